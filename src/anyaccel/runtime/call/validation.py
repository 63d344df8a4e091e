"""Checks that reject an invalid pipeline call before it runs, so the pipeline remains usable."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from anyaccel.backends.device import is_available
from anyaccel.call_limits import SIDES, check_side, check_steps
from anyaccel.errors import DeviceUnavailableError, UsageError, find_similar
from anyaccel.runtime.call_request import CallRequest
from anyaccel.runtime.introspection import plain_class
from anyaccel.runtime.keyword_use import find_unused_keywords, list_parameters
from anyaccel.runtime.library_code import is_library_code
from anyaccel.runtime.placement_state import Placement
from anyaccel.upstream.diffusers_hooks import list_calls

__all__ = ["find_size_multiple", "reject_unused_seed", "validate_call", "warn_unused_arguments"]

# From `warn_unused_arguments` over `run_call` and the portable `__call__` to the code that calls the pipeline.
_STACK_LEVEL = 4


def validate_call(pipe: Any, placement: Placement, request: CallRequest) -> None:
    """Raise an `AnyaccelError` if the device is unavailable or the request's arguments are invalid."""
    if not is_available(placement.plan.device):
        raise DeviceUnavailableError(
            f"{placement.plan.device} is no longer available",
            hint='move the pipeline to an available device with pipe.to("auto")',
        )
    if is_library_code(plain_class(pipe).__call__):  # in one of the user, -1 may mean a default
        _validate_steps(request)
        _check_size(request)


def _validate_steps(request: CallRequest) -> None:
    """Raise if the number of steps is less than 1, unless the call has custom timesteps or sigmas."""
    # Some schedulers accept 0 steps, and the pipeline would return decoded noise.
    steps = request.arguments.get("num_inference_steps")
    custom = any(request.arguments.get(name) is not None for name in ("timesteps", "sigmas"))
    if isinstance(steps, int) and steps < 1 and not custom:
        check_steps(steps)


def _check_size(request: CallRequest) -> None:
    """Raise if the image height or width is negative."""
    # Nothing else: pipelines check sizes themselves, some round them, and for some 0 is the default size.
    for name in SIDES:
        side = request.arguments.get(name)
        if isinstance(side, int) and side < 0:
            check_side(name, side)


def warn_unused_arguments(pipe: Any, names: Iterable[str]) -> None:
    """Warn about keyword arguments that the pipeline accepts through `**kwargs` but never reads."""
    kind = plain_class(pipe)
    for name in find_unused_keywords(kind, [name for name in names if name != "seed"]):
        similar = find_similar(name, list_parameters(kind))
        suggestion = f"; did you mean {similar}?" if similar else ""
        warnings.warn(
            f"{name!r} is not an argument of {kind.__name__} and has no effect{suggestion}", stacklevel=_STACK_LEVEL
        )


def reject_unused_seed() -> None:
    """Raise `UsageError` if a pipeline that is not placed is running with a `seed`, which has no effect."""
    for caller, keywords in list_calls():
        is_plain = plain_class(caller) is type(caller)
        if is_plain and keywords.get("seed") is not None and find_unused_keywords(type(caller), ["seed"]):
            raise UsageError(
                f"seed={keywords['seed']!r} has no effect: this {type(caller).__name__} is not placed",
                hint="place it first with anyaccel.place(pipe, device), or pass generator= instead of seed=",
            )


def find_size_multiple(pipe: Any) -> int | None:
    """Return the VAE scale factor, which must divide height and width; return None if it is unknown."""
    factor = getattr(pipe, "vae_scale_factor", None)
    return factor if isinstance(factor, int) and factor > 0 else None
