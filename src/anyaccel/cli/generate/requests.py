"""What `anyaccel generate` has to do: an order for the prompts, or one for each picture that is made again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from anyaccel.backends.device import find_device, read_device
from anyaccel.cli.generate.options import Options
from anyaccel.errors import ModelError, UsageError
from anyaccel.generation.metadata import ImageMetadata
from anyaccel.generation.request import GenerationRequest, make_request

__all__ = ["GenerateTask", "make_jobs"]


@dataclass(frozen=True, kw_only=True)
class GenerateTask:
    """An order, and what it repeats."""

    order: GenerationRequest
    then: ImageMetadata | None = None
    """How the picture was made that is to be made again."""


def make_jobs(options: Options, prompts: Sequence[str], origins: Sequence[ImageMetadata]) -> list[GenerateTask]:
    """Everything that is to be made, with the options that were given over what a record says."""
    if origins:
        return [_repeat(options, origin) for origin in origins]
    if not prompts and options.explain:
        prompts = [""]  # a plan needs no prompt
    order = make_request(
        prompts,
        options.model,
        options.device or "auto",
        options.seed,
        dtype=options.dtype,
        speed=options.speed or "exact",
        **options.read_call(),
    )
    return [GenerateTask(order=order)]


def _repeat(options: Options, origin: ImageMetadata) -> GenerateTask:
    """The order that makes a picture again; on the kind of device that made it, if that is here."""
    recorded = origin.arguments()
    kind = recorded["device"]
    changed: dict[str, Any] = {"device": options.device or (kind if _can_have(kind) else "auto")}
    if changed["device"] != kind:
        changed["dtype"] = None  # what was best there may be a hundred times slower here
    if options.model is not None:
        changed |= {"model": options.model, "revision": None}
    given = {"seed": options.seed, "dtype": options.dtype, "speed": options.speed}
    changed |= {name: value for name, value in given.items() if value is not None}
    try:
        order = make_request(**(recorded | changed | options.read_call()))
    except ModelError as error:
        raise ModelError(
            f"the picture was made with {origin.model}, which is not here: {error.message}",
            hint="--model says where it is now",
        ) from error
    return GenerateTask(order=order, then=origin)


def _can_have(kind: str) -> bool:
    """Whether this process can work on such a device: one that is here or, of the virtual ones, one that is not."""
    try:
        spec = read_device(kind)
        found = find_device(spec)
    except UsageError:  # a plugin's, which is not installed here
        return False
    return found.virtual or found.available != spec.virtual
