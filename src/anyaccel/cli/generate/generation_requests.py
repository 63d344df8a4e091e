"""Generation requests for `anyaccel generate`: one for all prompts, or one per regenerated image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from anyaccel.backends.device import find_device, read_device
from anyaccel.cli.generate.options import Options
from anyaccel.embedded.motion import VIDEO_NAME, choose_name
from anyaccel.errors import ModelError, UsageError
from anyaccel.generation.call_values import convert_settings, parse_settings
from anyaccel.generation.input_files import read_inputs
from anyaccel.generation.inputs import INPUT_OPTIONS
from anyaccel.generation.metadata import MediaMetadata
from anyaccel.generation.model_name import ResolvedModel, resolve_model
from anyaccel.generation.request import GenerationRequest, make_request

__all__ = ["GenerateTask", "make_tasks"]


# Arguments that set the length of a video or audio: one of them replaces the others.
_LENGTHS = ("frames", "seconds", "num_frames")


@dataclass(frozen=True, kw_only=True)
class GenerateTask:
    """A generation request, with the metadata of the original image if it regenerates one."""

    request: GenerationRequest
    original: MediaMetadata | None = None
    """Metadata of the image to regenerate; None for a new image."""


def make_tasks(options: Options, prompts: Sequence[str], originals: Sequence[MediaMetadata]) -> list[GenerateTask]:
    """Return one task for all prompts, or one task per image to regenerate.

    Command-line options override the metadata of the original images.
    """
    if originals:
        return [_regenerate(options, original) for original in originals]
    if not prompts and options.explain:
        prompts = [""]  # a plan does not depend on the prompt
    settings = _read_settings(options, resolve_model(choose_name(options.model, options.read_call())))
    request = make_request(
        prompts or None,
        options.model,
        options.device or "auto",
        options.seed,
        dtype=options.dtype,
        speed=options.speed or "exact",
        weights=options.weights,
        **options.read_additions(),
        **options.read_call(),
        **settings,
    )
    return [GenerateTask(request=request)]


def _read_settings(options: Options, model: ResolvedModel) -> dict[str, Any]:
    """Return the call arguments of `--set`, converted to the types of the pipeline's call."""
    texts = parse_settings(options.settings)
    if not texts:
        return {}
    from anyaccel.generation.pipeline_interface import find_interface
    from anyaccel.generation.tasks import check_task

    interface = find_interface(model)
    if interface is not None:
        call = read_inputs({name: value for name, value in options.read_call().items() if name in INPUT_OPTIONS})
        interface = check_task(interface, call, controlnet=bool(options.control_models))
    name = "the pipeline" if interface is None else interface.name
    return convert_settings(texts, None if interface is None else interface.parameters, name)


def _regenerate(options: Options, original: MediaMetadata) -> GenerateTask:
    """Return the task that regenerates an image, on the original device type if it is available."""
    call, additions = options.read_call(), options.read_additions()
    replaced = {*call, *additions, *(_LENGTHS if set(call) & set(_LENGTHS) else ())}
    if "seconds" in call and original.model == VIDEO_NAME:
        replaced.add("fps")  # it follows from the duration, because the number of frames is limited
    recorded = original.arguments(replaced=replaced)
    model = options.model if options.model is not None else original.model
    settings = _read_settings(options, resolve_model(choose_name(model, recorded | call))) if options.settings else {}
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
        request = make_request(**(recorded | overrides | additions | call | settings))
    except ModelError as error:
        raise ModelError(
            f"the {original.kind} was generated with {original.model}, which is not available: {error.message}",
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
