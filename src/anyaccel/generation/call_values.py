"""Values of call arguments from text, as in `--set NAME=VALUE`: literals of the types that the pipeline accepts."""

from __future__ import annotations

import ast
import inspect
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from anyaccel.errors import UsageError, nearest

__all__ = ["convert_settings", "parse_settings"]

_SETTING = re.compile(r"(?P<name>[A-Za-z_]\w*)\s*=(?P<value>.*)", re.DOTALL)
_HINT = "for example --set guidance_rescale=0.7, once for each argument"
_CONSTANTS = {"true": True, "false": False, "null": None, "none": None}
# Types that a literal can have. A list stands for every sequence.
_LITERALS: tuple[type, ...] = (bool, int, float, str, list, dict, type(None))


def parse_settings(settings: Iterable[str]) -> dict[str, str]:
    """Split settings such as `guidance_rescale=0.7` into names and texts; raise UsageError for any other text."""
    parsed: dict[str, str] = {}
    for setting in settings:
        match = _SETTING.fullmatch(setting.strip())
        if match is None:
            raise UsageError(f"--set {setting!r:.60} does not have the form NAME=VALUE", hint=_HINT)
        if match["name"] in parsed:
            raise UsageError(f"--set sets {match['name']} twice", hint="pass it once")
        parsed[match["name"]] = match["value"].strip()
    return parsed


def convert_settings(
    settings: Mapping[str, str], parameters: Mapping[str, inspect.Parameter] | None, pipeline: str
) -> dict[str, Any]:
    """Convert the texts to values of the types that a pipeline's call accepts.

    Without parameters, because the class is not known before loading, a text that is not a literal stays a string.
    """
    converted = {}
    for name, text in settings.items():
        if parameters is not None and name not in parameters:
            raise UsageError(f"{pipeline} does not accept the argument {name}", hint=nearest(name, parameters))
        annotation = inspect.Parameter.empty if parameters is None else parameters[name].annotation
        converted[name] = _convert(name, text, _list_types(annotation))
    return converted


def _list_types(annotation: Any) -> Sequence[type]:
    """Return the types of literals that an annotation allows; none if it is unknown."""
    if annotation is inspect.Parameter.empty or isinstance(annotation, str):
        return ()
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [kind for part in typing.get_args(annotation) for kind in _list_types(part)]
    origin = typing.get_origin(annotation) or annotation
    if origin is typing.Any:
        return ()
    if not isinstance(origin, type):
        return [] if callable(origin) else ()
    if issubclass(origin, list | tuple):
        return [list]
    return [origin] if origin in _LITERALS else [dict] if issubclass(origin, Mapping) else [object]


def _convert(name: str, text: str, kinds: Sequence[type]) -> Any:
    value = _read_literal(text)
    allowed = [kind for kind in kinds if kind is not object]
    if not kinds or _matches(value, allowed):
        # 1 is 1.0 for an argument that is always a float.
        return float(value) if type(value) is int and float in allowed and int not in allowed else value
    if str in allowed:
        return text
    names = [kind.__name__ for kind in allowed if kind is not type(None)]
    if not names:
        raise UsageError(
            f"{name} cannot be set on the command line: it is not a number, a string or a list of them",
            hint="call anyaccel.generate in Python",
        )
    raise UsageError(f"{name} must be {' or '.join(dict.fromkeys(names))}, not {text!r:.60}", hint=_HINT)


def _read_literal(text: str) -> Any:
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def _matches(value: Any, allowed: Sequence[type]) -> bool:
    if isinstance(value, bool):
        return bool in allowed
    if isinstance(value, int) and float in allowed:
        return True
    return isinstance(value, tuple(list | tuple if kind is list else kind for kind in allowed) or (type(None),))
