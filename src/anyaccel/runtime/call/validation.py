"""Admission: what cannot work is refused before any long work, and the pipeline stays usable."""

from __future__ import annotations

from typing import Any

from anyaccel.backends.device import is_available
from anyaccel.call_limits import SIDES, check_side, check_steps
from anyaccel.errors import DeviceUnavailableError, UsageError
from anyaccel.runtime.call_request import CallRequest
from anyaccel.runtime.placement_state import Placement

__all__ = ["find_multiple", "validate_call"]


def validate_call(placement: Placement, request: CallRequest) -> None:
    """Raise an error of our tree, with a hint, if the request cannot be run."""
    if not is_available(placement.plan.device):
        raise DeviceUnavailableError(
            f"{placement.plan.device} is not there any more", hint='place the pipeline again: pipe.to("auto")'
        )
    _admit_steps(request)
    _admit_size(request)
    _admit_generators(request)


def _admit_steps(request: CallRequest) -> None:
    """Raise for fewer steps than one, of which some schedulers would return noise; a custom schedule has its own."""
    steps = request.arguments.get("num_inference_steps")
    custom = any(request.arguments.get(name) is not None for name in ("timesteps", "sigmas"))
    if isinstance(steps, int) and steps < 1 and not custom:
        check_steps(steps)


def _admit_size(request: CallRequest) -> None:
    """Raise for a negative size; what else a size must be is the pipeline's to say, and some round it."""
    for name in SIDES:
        side = request.arguments.get(name)
        if isinstance(side, int) and side < 0:
            check_side(name, side)


def _admit_generators(request: CallRequest) -> None:
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


def find_multiple(pipe: Any) -> int | None:
    """What a size must be a multiple of: the factor by which the autoencoder shrinks; None where it is not known."""
    factor = getattr(pipe, "vae_scale_factor", None)
    return factor if isinstance(factor, int) and factor > 0 else None
