"""Images, videos and audio from the output of a pipeline call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from PIL import Image

from anyaccel.errors import UsageError
from anyaccel.generation.pipeline_interface import AUDIO_OUTPUTS, IMAGE_OUTPUTS, VIDEO_OUTPUTS, PipelineInterface
from anyaccel.media.types import Audio, Media, Video
from anyaccel.runtime.call_parameters import read_blocks

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["collect_media", "find_sampling_rate", "read_audio_channels", "read_sampling_rate", "select_outputs"]

_USE_PYTHON = (
    "in Python, load it with anyaccel.DiffusionPipeline.from_pretrained(model), then call pipe.to(device) and pipe(…)"
)
# Components that produce waveforms, and the keys of their configs with the sampling rate, best first.
_AUDIO_COMPONENTS = ("vocoder", "sound_tokenizer", "audio_vae", "audio_decoder", "vae", "unet", "mel")
_RATE_KEYS = ("output_sampling_rate", "sampling_rate", "sample_rate")
_MODULAR_RATE = "sampling_rate"
_MOST_CHANNELS = 8


def select_outputs(interface: PipelineInterface) -> dict[str, Any]:
    """Return the call arguments that make a pipeline return PIL images, or its media if it is modular."""
    pipe = interface.pipe
    if read_blocks(pipe) is None:
        as_pil = interface.kind != "audio" and "output_type" in interface.parameters
        return {"output_type": "pil"} if as_pil else {}
    names = _find_fields(interface)
    if _MODULAR_RATE in _list_all_outputs(pipe):
        names.append(_MODULAR_RATE)
    as_pil = interface.kind != "audio" and "output_type" in interface.parameters
    return {"output": names, **({"output_type": "pil"} if as_pil else {})}


def _list_all_outputs(pipe: Any) -> list[str]:
    from anyaccel.runtime.call_parameters import list_block_outputs

    return list_block_outputs(pipe)


def _find_fields(interface: PipelineInterface) -> list[str]:
    """Return the names of the output with the images, frames or samples, and of the audio track of a video."""
    outputs = interface.outputs
    visual = next((name for name in (*VIDEO_OUTPUTS, *IMAGE_OUTPUTS) if name in outputs), None)
    if interface.kind == "image":
        visual = next((name for name in IMAGE_OUTPUTS if name in outputs), None)
    audio = next((name for name in AUDIO_OUTPUTS if name in outputs), None)
    wanted = [visual] if interface.kind == "image" else [visual, audio]
    return [name for name in wanted if name is not None]


def collect_media(interface: PipelineInterface, output: Any, fps: float, expected: int = 1) -> list[Media]:
    """Return the images, videos or audio of a pipeline's output; raise UsageError if there are not `expected` ones."""
    names = _find_fields(interface)
    if not names:
        returned = f"an object of type {type(output).__name__}"
        raise UsageError(f"{interface.name} returned {returned}, not images, video or audio", hint=_USE_PYTHON)
    values = {name: _read_output(output, name) for name in names}
    rate = _read_output(output, _MODULAR_RATE)
    results: list[Media]
    if interface.kind == "audio":
        results = list(_split_audio(interface, values[names[0]], rate, expected))
    elif interface.kind == "video":
        videos = _split_videos(interface, values[names[0]])
        track = values.get(names[1]) if len(names) > 1 else None
        tracks = [None] * len(videos) if track is None else _split_audio(interface, track, rate, len(videos))
        results = [Video(frames, fps, audio) for frames, audio in zip(videos, tracks, strict=False)]
    else:
        results = [item if isinstance(item, Image.Image) else _to_image(item) for item in _as_list(values[names[0]])]
    if len(results) != expected:
        raise UsageError(f"{interface.name} returned {len(results)} results instead of {expected}", hint=_USE_PYTHON)
    return results


def _read_output(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, Image.Image):
        return [value]
    return list(value) if value is not None else []


def _split_videos(interface: PipelineInterface, value: Any) -> list[list[Image.Image]]:
    """Return the frames of each video in the output of a pipeline: a list per video, or an array."""
    items = _as_list(value)
    if not items:
        raise UsageError(f"{interface.name} returned no frames", hint=_USE_PYTHON)
    # A single video may come without the batch: images, or an array of frames, height, width and channels.
    if isinstance(items[0], Image.Image) or getattr(items[0], "ndim", 4) == 3:
        items = [items]
    return [[frame if isinstance(frame, Image.Image) else _to_image(frame) for frame in video] for video in items]


def _to_image(frame: Any) -> Image.Image:
    """Convert a frame with values from 0 to 1, or integers from 0 to 255, to an image."""
    import numpy as np

    array = _to_array(frame)
    if array.ndim == 3 and array.shape[0] in (1, 3) and array.shape[-1] not in (1, 3):  # channels first, as in torch
        array = array.transpose(1, 2, 0)
    if array.dtype != np.uint8:
        array = (array.clip(0, 1) * 255).round().astype(np.uint8)
    return Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array).convert("RGB")


def _to_array(value: Any) -> npt.NDArray[Any]:
    import numpy as np

    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float().numpy() if value.is_floating_point() else value.numpy()
    return np.asarray(value)


def _split_audio(interface: PipelineInterface, value: Any, rate: Any, count: int) -> list[Audio]:
    """Return the audio of each result, in channels and samples."""
    import numpy as np

    if value is None:
        raise UsageError(f"{interface.name} returned no audio", hint=_USE_PYTHON)
    sampling_rate = int(rate) if isinstance(rate, int | float) else find_sampling_rate(interface.pipe)
    items = list(value) if isinstance(value, list | tuple) else _to_array(value)
    # A single result may come without the batch: samples, or channels and samples.
    arrays = [_to_array(items)] if count == 1 and getattr(items, "ndim", 3) < 3 else [_to_array(item) for item in items]
    results = []
    for array in arrays:
        samples = np.atleast_2d(array.astype(np.float32))
        # Audio has many more samples than channels.
        if samples.shape[0] > _MOST_CHANNELS >= samples.shape[1]:
            samples = samples.T
        results.append(Audio(np.ascontiguousarray(samples), sampling_rate))
    return results


def find_sampling_rate(pipe: Any) -> int:
    """Return the sampling rate in the config of the model that produces the waveform."""
    rate = read_sampling_rate(pipe)
    if rate is None:
        raise UsageError(
            f"the sampling rate of {type(pipe).__name__} is not in the config of its models", hint=_USE_PYTHON
        )
    return rate


def read_sampling_rate(pipe: Any) -> int | None:
    """Return the sampling rate in the config of the model that produces the waveform, or None if there is none."""
    return _read_audio_config(pipe, _RATE_KEYS)


def read_audio_channels(pipe: Any) -> int | None:
    """Return the number of audio channels in the config of the model that produces the waveform, or None."""
    return _read_audio_config(pipe, ("audio_channels",))


def _read_audio_config(pipe: Any, keys: tuple[str, ...]) -> int | None:
    components: Mapping[str, Any] = getattr(pipe, "components", {})
    ordered = [name for name in _AUDIO_COMPONENTS if name in components]
    for name in [*ordered, *(name for name in components if name not in ordered)]:
        config = getattr(components[name], "config", None)
        for key in keys:
            value = getattr(config, key, None)
            if isinstance(value, int | float) and value > 0:
                return int(value)
    return None
