"""Admission: what cannot work is refused before any long work, and the pipeline stays usable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anyaccel.backends.device import is_available
from anyaccel.errors import DeviceUnavailableError, UsageError
from anyaccel.runtime.placement import Placement
from anyaccel.runtime.request import Request

__all__ = ["admit", "check_size", "find_multiple"]


def admit(pipe: Any, placement: Placement, request: Request) -> None:
    """Raise an error of our tree, with a hint, if the request cannot be run."""
    if not is_available(placement.plan.device):
        raise DeviceUnavailableError(
            f"{placement.plan.device} is not there any more", hint='place the pipeline again: pipe.to("auto")'
        )
    _check_steps(request)
    check_size(pipe, request.arguments)
    _check_generators(request)


def _check_steps(request: Request) -> None:
    steps = request.arguments.get("num_inference_steps")
    if isinstance(steps, bool) or (isinstance(steps, int) and steps < 1):
        raise UsageError(f"a picture takes at least one step, not {steps!r}", hint="for example num_inference_steps=20")


def _check_generators(request: Request) -> None:
    """A list holds one for each image; where nothing is prompted, images are counted at the least."""
    given = request.arguments.get("generator")
    if not isinstance(given, list | tuple):
        return
    prompted = request.arguments.get("prompt") is not None
    if len(given) < request.images or (prompted and len(given) > request.images):
        images = f"{request.images} image{'s' if request.images != 1 else ''}"
        raise UsageError(
            f"{len(given)} generator{'s were' if len(given) != 1 else ' was'} given for {images}",
            hint="give a list with one generator for each image, or a single generator without a list",
        )


def check_size(pipe: Any, arguments: Mapping[str, Any]) -> None:
    """Raise if `height` or `width` is none that the pipeline takes; one that is None is left to it."""
    multiple = find_multiple(pipe)
    for name in ("height", "width"):
        value = arguments.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"{name} is a whole number of pixels, not {value!r}", hint=f"for example {name}=512")
        if multiple is not None and value % multiple:
            below = value // multiple * multiple
            raise UsageError(
                f"{name} is a multiple of {multiple} for this model, not {value}",
                hint=f"take {below} or {below + multiple}" if below else f"take {multiple}",
            )


def find_multiple(pipe: Any) -> int | None:
    """What a size must be a multiple of: the factor by which the autoencoder shrinks; None where it is not known."""
    factor = getattr(pipe, "vae_scale_factor", None)
    return factor if isinstance(factor, int) and factor > 0 else None
