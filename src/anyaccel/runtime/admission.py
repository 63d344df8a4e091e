"""Admission: what cannot work is refused before any long work, and the pipeline stays usable."""

from __future__ import annotations

from typing import Any

from anyaccel.backends.device import is_available
from anyaccel.errors import DeviceUnavailableError, UsageError
from anyaccel.runtime.placement import Placement
from anyaccel.runtime.request import Request

__all__ = ["admit"]


def admit(pipe: Any, placement: Placement, request: Request) -> None:
    """Raise an error of our tree, with a hint, if the request cannot be run."""
    if not is_available(placement.plan.device):
        raise DeviceUnavailableError(
            f"{placement.plan.device} is not there any more", hint='place the pipeline again: pipe.to("auto")'
        )
    _check_steps(request)
    _check_size(pipe, request)


def _check_steps(request: Request) -> None:
    steps = request.arguments.get("num_inference_steps")
    if isinstance(steps, bool) or (isinstance(steps, int) and steps < 1):
        raise UsageError(f"a picture takes at least one step, not {steps!r}", hint="for example num_inference_steps=20")


def _check_size(pipe: Any, request: Request) -> None:
    multiple = _find_multiple(pipe)
    for name in ("height", "width"):
        value = request.arguments.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"{name} is a whole number of pixels, not {value!r}", hint=f"for example {name}=512")
        if multiple is not None and value % multiple:
            below = value // multiple * multiple
            raise UsageError(
                f"{name} is a multiple of {multiple} for this model, not {value}",
                hint=f"take {below or multiple} or {below + multiple}",
            )


def _find_multiple(pipe: Any) -> int | None:
    """What a size must be a multiple of: the factor by which the autoencoder shrinks; None where it is not known."""
    factor = getattr(pipe, "vae_scale_factor", None)
    return factor if isinstance(factor, int) and factor > 0 else None
