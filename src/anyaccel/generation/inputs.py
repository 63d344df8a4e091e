"""Input media of pipeline calls: which parameter of a pipeline takes an image, a mask, a video or audio."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from anyaccel.errors import UsageError

if TYPE_CHECKING:
    from anyaccel.media.types import Kind

__all__ = ["GENERIC_INPUTS", "INPUT_OPTIONS", "INPUT_PARAMETERS", "InputMedia", "assign_inputs", "find_parameter"]

INPUT_PARAMETERS: Mapping[str, Kind] = {
    **dict.fromkeys(
        ("image", "images", "reference_images", "input_images", "ref_image", "reference_image", "image_reference",
         "last_image", "example_image", "original_image", "source_image", "cond_image", "ip_adapter_image",
         "negative_ip_adapter_image", "control_image", "mask_image", "mask", "control_mask"),
        "image",
    ),
    **dict.fromkeys(
        ("video", "control_video", "conditioning_frames", "pose_video", "face_video", "background_video", "mask_video",
         "driving_video"),
        "video",
    ),
    **dict.fromkeys(("audio", "initial_audio_waveforms", "src_audio", "reference_audio"), "audio"),
}  # fmt: skip
"""Parameters of the calls of diffusers pipelines that take media, with the kind (diffusers 0.42)."""

GENERIC_INPUTS: Mapping[str, tuple[str, ...]] = {
    "image": (
        "image", "images", "reference_images", "input_images", "ref_image", "reference_image", "image_reference",
    ),
    "mask_image": ("mask_image", "mask"),
    "control_image": ("control_image", "control_video", "conditioning_frames", "image"),
    "video": ("video", "driving_video"),
    "audio": ("audio", "initial_audio_waveforms", "src_audio", "reference_audio"),
    "ip_adapter_image": ("ip_adapter_image",),
}  # fmt: skip
"""Parameters to which each input of `generate` is passed: the first one that the pipeline has."""

INPUT_OPTIONS = {
    "image": "--image", "mask_image": "--mask", "control_image": "--control", "video": "--video", "audio": "--audio",
    "ip_adapter_image": "--ip-image",
}  # fmt: skip
"""Command-line option of each input."""

# Parameters and pipelines that always get a list.
_LISTS = ("images", "reference_images", "input_images")
_ALWAYS_LISTED = ("GlmImagePipeline",)
# Parameters for the second of two input images: the last frame, or a reference for the masked area.
_SECOND_IMAGES = ("last_image", "image_reference")
# Parameter with the sampling rate of an audio input.
_RATES = {"initial_audio_waveforms": "initial_audio_sampling_rate"}


@dataclass(frozen=True, eq=False, kw_only=True)
class InputMedia:
    """An image, a video or audio that is passed to a pipeline, with the file that it was read from."""

    kind: Kind
    media: Any
    """A PIL image, a `Video` or an `Audio`."""
    path: str | None = None
    """Absolute path of the file, with `~` for the home folder; None if the input was not a file."""
    sha256: str | None = None
    """Digest of the file."""


def find_parameter(name: str, parameters: Collection[str], components: Collection[str] = ()) -> str | None:
    """Return the parameter that takes an input, or None if the pipeline has no such parameter.

    The parameter `image` of a ControlNet pipeline without `control_image` is the control image.
    """
    with_control = any(component.startswith(("controlnet", "adapter")) for component in components)
    is_control = with_control and "control_image" not in parameters and "mask_image" not in parameters
    for parameter in GENERIC_INPUTS.get(name, (name,)):
        if parameter not in parameters:
            continue
        if parameter == "image" and (name == "control_image") != is_control:
            continue
        return parameter
    return name if name in parameters and name not in GENERIC_INPUTS else None


def assign_inputs(
    pipeline: str,
    parameters: Collection[str],
    components: Collection[str],
    call: Mapping[str, Any],
    rate: int | None = None,
    channels: int | None = None,
) -> dict[str, Any]:
    """Return the call with each input under the pipeline's parameter for it, as the object that diffusers expects.

    Audio is converted to `rate` samples per second and to mono or stereo; None leaves it unchanged. Raise UsageError
    if the pipeline does not take an input, or fewer of them.
    """
    arguments: dict[str, Any] = {}
    for name, value in call.items():
        inputs = _as_inputs(value)
        if inputs is None:
            arguments[name] = value
            continue
        parameter = find_parameter(name, parameters, components)
        if parameter is None:
            raise UsageError(f"{pipeline} does not take {_describe(name)}", hint=_suggest(name, parameters))
        inputs = [_convert_audio(item, rate, channels) for item in inputs]
        arguments.update(_assign(pipeline, name, parameter, parameters, inputs))
    return arguments


def _as_inputs(value: Any) -> list[InputMedia] | None:
    """Return the input media in a call argument, or None if it is another value."""
    if isinstance(value, InputMedia):
        return [value]
    is_list = isinstance(value, list | tuple) and value and all(isinstance(item, InputMedia) for item in value)
    return list(value) if is_list else None


def _assign(
    pipeline: str, name: str, parameter: str, parameters: Collection[str], inputs: Sequence[InputMedia]
) -> dict[str, Any]:
    # Imported here: usage errors are reported before NumPy and torch are imported.
    from anyaccel.media.types import Audio
    from anyaccel.runtime.call_request import takes_reference_images

    values = [_convert(item, parameter) for item in inputs]
    if parameter == "input_images":
        return {parameter: [values]}  # OmniGen: one list for each prompt
    if parameter in ("control_video", "conditioning_frames", "video", "driving_video") and len(values) == 1:
        return {parameter: values[0] if isinstance(values[0], list) else values}
    many = parameter in _LISTS or (parameter == "image" and takes_reference_images(pipeline))
    if many or name in ("control_image", "ip_adapter_image"):
        as_list = len(values) > 1 or parameter in _LISTS or (parameter == "image" and pipeline in _ALWAYS_LISTED)
        return {parameter: values if as_list else values[0]}
    if len(values) == 1:
        rate = _RATES.get(parameter)
        media = inputs[0].media
        has_rate = rate is not None and rate in parameters and isinstance(media, Audio)
        return {parameter: values[0], **({str(rate): media.rate} if has_rate else {})}
    second = next((other for other in _SECOND_IMAGES if other in parameters), None)
    if len(values) == 2 and name == "image" and second is not None:
        return {parameter: values[0], second: values[1]}
    hint = f"pass {INPUT_OPTIONS.get(name, name)} once"
    if name == "image":
        hint += ", or use a model that takes several images, such as FLUX.2 or Qwen-Image-Edit-2509"
    raise UsageError(f"{pipeline} takes one {inputs[0].kind} as {parameter}, not {len(values)}", hint=hint)


def _convert_audio(item: InputMedia, rate: int | None, channels: int | None) -> InputMedia:
    from anyaccel.media.resampling import convert_channels, resample
    from anyaccel.media.types import Audio

    audio = item.media
    if not isinstance(audio, Audio):
        return item
    audio = audio if channels is None else convert_channels(audio, channels)
    return replace(item, media=audio if rate is None else resample(audio, rate))


def _convert(item: InputMedia, parameter: str) -> Any:
    """Return an input as diffusers expects it: a PIL image, a list of PIL images, or a tensor of samples."""
    from anyaccel.media.types import Audio, Video

    if isinstance(item.media, Video):
        return list(item.media.frames)
    if isinstance(item.media, Audio):
        import torch

        samples = torch.from_numpy(item.media.samples)
        return samples if parameter in ("src_audio", "reference_audio") else samples[None]
    return item.media


def _describe(name: str) -> str:
    kind = {"mask_image": "a mask", "control_image": "a control image", "ip_adapter_image": "an IP-Adapter image"}
    return kind.get(name) or {"image": "an input image", "video": "an input video", "audio": "input audio"}.get(
        name, f"the argument {name}"
    )


def _suggest(name: str, parameters: Collection[str]) -> str:
    taken = [option for other, option in INPUT_OPTIONS.items() if find_parameter(other, parameters)]
    also = f"; it takes {', '.join(taken)}" if taken else ""
    return f"omit {INPUT_OPTIONS.get(name, name)}, or use a model for this task{also}"
