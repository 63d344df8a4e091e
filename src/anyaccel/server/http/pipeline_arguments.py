"""Further pipeline arguments in a request, checked against the pipeline's signature and limited."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from anyaccel.errors import nearest
from anyaccel.server.http.errors import ApiError
from anyaccel.server.settings import ServerLimits
from anyaccel.server.worker.job_spec import Task
from anyaccel.server.worker.messages import ModelFacts

__all__ = ["check_arguments"]

_MAX_ARGUMENTS = 32
_MAX_ITEMS = 256
# Integers such as `max_sequence_length` determine how much memory a call allocates.
_MAX_INTEGER = 4096
_MAX_SEED = 2**32
_MAX_NUMBER = 1e6
# `find_settable_arguments` names the types.
_TYPES: Mapping[str, tuple[type, ...]] = {"integer": (int,), "number": (int, float), "string": (str,)}
_ARRAY = "array of "


def check_arguments(
    values: Mapping[str, Any],
    facts: ModelFacts,
    task: Task,
    limits: ServerLimits,
    *,
    from_form: bool,
    known: Sequence[str],
) -> dict[str, Any]:
    """Return the pipeline arguments in the unknown fields of a request.

    The fields of a form are texts, which are parsed as JSON. `known` are the names of the other fields. Raises
    `ApiError` if the pipeline has no such argument, or the value has the wrong type or exceeds a limit.
    """
    types = facts.arguments.get(task, {})
    if len(values) > _MAX_ARGUMENTS:
        raise ApiError(400, "too_large", f"a request can have at most {_MAX_ARGUMENTS} pipeline arguments")
    arguments = {}
    for name, value in values.items():
        if name not in types:
            raise _make_unknown(name, facts, task, (*known, *types))
        parsed = _parse(value, types[name]) if from_form else value
        if parsed is None:
            continue
        _check_type(name, parsed, types[name])
        _check_limit(name, parsed, limits)
        arguments[name] = parsed
    return arguments


def _make_unknown(name: str, facts: ModelFacts, task: Task, known: Sequence[str]) -> ApiError:
    shown = name[:60]
    if name in facts.parameters.get(task, ()):
        message = f"the argument {shown!r} of {facts.pipeline} cannot be set by a request"
        return ApiError(400, "unsupported_parameter", message, param=shown)
    return ApiError(400, "unknown_parameter", f"unknown parameter {shown!r}: {nearest(shown, known)}", param=shown)


def _parse(value: Any, types: Sequence[str]) -> Any:
    """Return the JSON value of a form field; a text that is not JSON stays a text."""
    if isinstance(value, list):
        return [_parse(item, types) for item in value]
    if not isinstance(value, str) or list(types) == ["string"]:
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _check_type(name: str, value: Any, types: Sequence[str]) -> None:
    if "prompt" in name:  # a list would be the prompts of several images
        types = [kind for kind in types if not kind.startswith(_ARRAY)]
    if isinstance(value, list):
        allowed = [kind.removeprefix(_ARRAY) for kind in types if kind.startswith(_ARRAY)]
        matches = bool(allowed) and all(_has_type(item, allowed) for item in value)
    else:
        matches = _has_type(value, types)
    if not matches:
        message = f"{name} must be of type {' or '.join(types)}, not {value!r:.60}"
        raise ApiError(400, "invalid_value", message, param=name)


def _has_type(value: Any, types: Sequence[str]) -> bool:
    if isinstance(value, bool):  # a subclass of int
        return "boolean" in types
    return any(isinstance(value, _TYPES[kind]) for kind in types if kind in _TYPES)


def _check_limit(name: str, value: Any, limits: ServerLimits) -> None:
    if isinstance(value, list):
        if len(value) > min(_MAX_ITEMS, limits.max_steps):
            message = f"{name} has {len(value)} items; the limit is {min(_MAX_ITEMS, limits.max_steps)}"
            raise ApiError(400, "too_large", message, param=name)
        if not value:
            raise ApiError(400, "invalid_value", f"{name} is an empty array; omit it", param=name)
        for item in value:
            _check_limit(name, item, limits)
        return
    if isinstance(value, str):
        if len(value) > limits.max_prompt:
            message = f"{name} has {len(value)} characters; the limit is {limits.max_prompt}"
            raise ApiError(400, "string_too_long", message, param=name)
        if value.encode("utf-8", "ignore").decode() != value:  # a lone surrogate
            raise ApiError(400, "invalid_value", f"{name} is not valid Unicode", param=name)
        return
    if isinstance(value, int) and value < 1 and ("length" in name or name.startswith("num_")):
        raise ApiError(400, "invalid_value", f"{name} must be at least 1, not {value}", param=name)
    limit = _find_number_limit(name, value, limits)
    if not math.isfinite(value) or abs(value) > limit:
        raise ApiError(400, "too_large", f"{name} must be at most {limit:g}, not {value!r:.40}", param=name)


def _find_number_limit(name: str, value: int | float, limits: ServerLimits) -> float:
    if isinstance(value, float):
        return _MAX_NUMBER
    if "steps" in name and "timestep" not in name:
        return limits.max_steps
    if "frames" in name:
        return limits.max_frames
    if "area" in name or "pixels" in name:
        return limits.max_pixels
    return _MAX_SEED if "seed" in name else _MAX_INTEGER
