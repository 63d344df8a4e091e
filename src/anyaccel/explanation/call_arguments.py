"""Arguments of the pipeline call that `explain` traces: the recipe's, at the size of a real call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from anyaccel.runtime.call_parameters import read_call_parameters
from anyaccel.runtime.durations import assign_durations, find_frame_parameter
from anyaccel.runtime.placement.memory_plan import find_sample_side
from anyaccel.tracing.meta_pipeline import FullSizePipeline

__all__ = [
    "UNKNOWN_SIDE",
    "CallSize",
    "RequestedSize",
    "accepts_size",
    "find_default_size",
    "find_frames_argument",
    "find_sampling_rate",
    "find_steps",
    "is_prompt_only",
    "make_call",
]

# Denoising steps of the traced call.
_STEPS = 2
_LENGTHS = ("max_sequence_length", "audio_length_in_s", "audio_end_in_s", "audio_duration_s")
# Arguments of a recipe that the pipeline's own defaults replace, because a recipe sets them for speed.
_LEFT_TO_DEFAULTS = (
    "generator",
    "num_inference_steps",
    "guidance_scale",
    "true_cfg_scale",
    *_LENGTHS,
    "output_type",
    "output",  # without it, a modular pipeline returns all its results by name
    "callback",
    "height",
    "width",
)
# A side of the input images of a pipeline without a default size.
UNKNOWN_SIDE = 1024


@dataclass(frozen=True)
class RequestedSize:
    """Size arguments of `explain`."""

    width: int | None = None
    height: int | None = None
    frames: int | None = None
    fps: float | None = None
    seconds: float | None = None
    """Duration of audio, or of a video instead of its number of frames."""
    steps: int | None = None
    """Number of denoising steps, for the time estimate."""

    @property
    def is_default(self) -> bool:
        """Whether no size was requested."""
        return replace(self, steps=None) == RequestedSize()

    def assign(self, pipe: Any, pipeline: str) -> CallSize:
        """Return the size of the call, without its width and height, for a pipeline."""
        requested = {"frames": self.frames, "fps": self.fps, "seconds": self.seconds}
        arguments = assign_durations(pipeline, read_call_parameters(pipe), requested, pipe)
        frames = arguments.pop(find_frames_argument(pipe) or "", None)
        return CallSize(frames=frames, arguments=tuple(arguments.items()))


@dataclass(frozen=True)
class CallSize:
    """Size of a call. None leaves the size or the number of frames to the pipeline's default."""

    size: tuple[int, int] | None = None
    """Width and height."""
    frames: int | None = None
    arguments: tuple[tuple[str, Any], ...] = ()
    """Other arguments of the call, such as the frame rate and the duration."""
    short: bool = False
    """Whether prompts and audio have the recipe's length instead of the pipeline's default."""

    def __str__(self) -> str:
        items = [f"{self.size[0]} × {self.size[1]}"] if self.size else []
        items += [f"{self.frames} frames"] if self.frames else []
        items += [f"{name}={value:g}" for name, value in self.arguments]
        return ", ".join(items)


def accepts_size(pipe: Any) -> bool:
    """Return whether a pipeline has arguments for height and width; audio pipelines do not."""
    return {"height", "width"} <= set(read_call_parameters(pipe))


def find_frames_argument(pipe: Any) -> str | None:
    """Return the name of a pipeline's argument for the number of frames, or None if it has none."""
    return find_frame_parameter(read_call_parameters(pipe))


def find_steps(pipe: Any, requested: int | None) -> int | None:
    """Return the requested number of denoising steps or the pipeline's default, or None if it has none."""
    parameter = read_call_parameters(pipe).get("num_inference_steps")
    default = getattr(parameter, "default", None)
    return requested or (default if isinstance(default, int) else None)


def find_default_size(pipe: Any) -> tuple[int, int] | None:
    """Return the width and height that a pipeline uses by default, or None if only a call would show them."""
    sides = [_find_default(pipe, name) or find_sample_side(pipe) for name in ("width", "height")]
    width, height = sides
    return None if width is None or height is None else (width, height)


def _find_default(pipe: Any, name: str) -> int | None:
    """Return the default width or height: of the call's signature, of the pipeline, or of the denoiser's config."""
    parameter = read_call_parameters(pipe).get(name)
    for default in (getattr(parameter, "default", None), getattr(pipe, f"default_{name}", None)):
        if isinstance(default, int):
            return default
    latent_side = getattr(getattr(getattr(pipe, "transformer", None), "config", None), f"sample_{name}", None)
    scale = getattr(pipe, "vae_scale_factor_spatial", None)
    return latent_side * scale if isinstance(latent_side, int) and isinstance(scale, int) else None


def find_sampling_rate(pipe: Any) -> int | None:
    """Return the samples per second of a pipeline's audio, or None if it is unknown."""
    for name in ("vocoder", "vae"):
        config = getattr(getattr(pipe, name, None), "config", None)
        for setting in ("sampling_rate", "sample_rate"):
            rate = getattr(config, setting, None)
            if isinstance(rate, int):
                return rate
    return None


def make_call(full: FullSizePipeline, size: CallSize, images: int) -> dict[str, Any]:
    """Return call arguments from the model's recipe for `images` images or videos of the given size."""
    parameters = read_call_parameters(full.pipe)
    frames_argument = find_frames_argument(full.pipe)
    left_out = {*_LEFT_TO_DEFAULTS, frames_argument} if accepts_size(full.pipe) else set(_LEFT_TO_DEFAULTS)
    left_out -= set(_LENGTHS) if size.short else set()
    call = {name: value for name, value in full.recipe.call().items() if name not in left_out}
    call = {name: _resize(value, size, full.pipe) for name, value in call.items()}
    arguments: dict[str, Any] = {"num_inference_steps": _STEPS, "output_type": "pt"}
    if size.size is not None:
        arguments |= {"width": size.size[0], "height": size.size[1]}
    if size.frames is not None and frames_argument is not None:
        arguments[frames_argument] = size.frames
    per_prompt = next((name for name in parameters if name.startswith("num_") and name.endswith("_per_prompt")), None)
    if per_prompt is not None:
        arguments[per_prompt] = images
    elif "batch_size" in parameters:
        arguments["batch_size"] = images
    elif isinstance(call.get("prompt"), str):
        arguments["prompt"] = [call["prompt"]] * images
    return call | {name: value for name, value in arguments.items() if name in parameters} | dict(size.arguments)


def is_prompt_only(call: dict[str, Any]) -> bool:
    """Return whether a call has a prompt and no other input, such as an image."""
    plain = (str, int, float, type(None), torch.Generator)
    return isinstance(call.get("prompt"), str) and all(isinstance(value, plain) for value in call.values())


def _resize(value: Any, size: CallSize, pipe: Any) -> Any:
    """Resize a PIL image to the size of the call; return any other value unchanged."""
    if accepts_size(pipe) and hasattr(value, "resize") and hasattr(value, "mode"):
        return value.resize(size.size or (UNKNOWN_SIDE, UNKNOWN_SIDE))
    return value
