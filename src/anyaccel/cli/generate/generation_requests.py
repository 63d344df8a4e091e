"""Generation requests for `anyaccel generate`: one for all prompts, or one per regenerated image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from anyaccel.backends.device import find_device, read_device
from anyaccel.cli.generate.options import Options
from anyaccel.errors import ModelError, UsageError
from anyaccel.generation.metadata import ImageMetadata
from anyaccel.generation.request import GenerationRequest, make_request

__all__ = ["GenerateTask", "make_tasks"]


@dataclass(frozen=True, kw_only=True)
class GenerateTask:
    """A generation request, with the metadata of the original image if it regenerates one."""

    request: GenerationRequest
    original: ImageMetadata | None = None
    """Metadata of the image to regenerate; None for a new image."""


def make_tasks(options: Options, prompts: Sequence[str], originals: Sequence[ImageMetadata]) -> list[GenerateTask]:
    """Return one task for all prompts, or one task per image to regenerate.

    Command-line options override the metadata of the original images.
    """
    if originals:
        return [_regenerate(options, original) for original in originals]
    if not prompts and options.explain:
        prompts = [""]  # a plan does not depend on the prompt
    request = make_request(
        prompts,
        options.model,
        options.device or "auto",
        options.seed,
        dtype=options.dtype,
        speed=options.speed or "exact",
        weights=options.weights,
        **options.read_call(),
    )
    return [GenerateTask(request=request)]


def _regenerate(options: Options, original: ImageMetadata) -> GenerateTask:
    """Return the task that regenerates an image, on the original device type if it is available."""
    recorded = original.arguments()
    kind = recorded["device"]
    overrides: dict[str, Any] = {"device": options.device or (kind if _is_usable(kind) else "auto")}
    if overrides["device"] != kind:
        # The recorded dtype can be very slow on another device, such as float16 on a CPU.
        overrides["dtype"] = None
    if options.model is not None:
        # The recorded commit belongs to the recorded model.
        overrides |= {"model": options.model, "revision": None}
    optional = {"seed": options.seed, "dtype": options.dtype, "speed": options.speed, "weights": options.weights}
    overrides |= {name: value for name, value in optional.items() if value is not None}
    try:
        request = make_request(**(recorded | overrides | options.read_call()))
    except ModelError as error:
        raise ModelError(
            f"the image was generated with {original.model}, which is not available: {error.message}",
            hint="pass the Hub ID or folder of this model with --model",
        ) from error
    return GenerateTask(request=request, original=original)


def _is_usable(kind: str) -> bool:
    """Return whether this process can use a device of this type."""
    try:
        spec = read_device(kind)
        device = find_device(spec)
    except UsageError:  # the device of a plugin that is not installed
        return False
    # The real device takes precedence: its virtual version can be opened only on machines without it.
    return device.virtual or device.available != spec.virtual
