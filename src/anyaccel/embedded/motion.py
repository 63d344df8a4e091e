"""Motion module of the embedded model, which generates videos: its location, call arguments and motion words.

The folder `motion` contains a diffusers `MotionAdapter` and a LoRA file for the UNet and the text encoder, both written
by `python -m training motion`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from anyaccel.embedded.model import CALL_DEFAULTS, NAME, find_embedded_model
from anyaccel.errors import ModelError, UsageError

__all__ = [
    "FRAMES",
    "LORA_FILE",
    "MIN_FRAMES",
    "MOTIONS",
    "VIDEO_CALL_DEFAULTS",
    "VIDEO_NAME",
    "choose_name",
    "find_motion_module",
    "fit_video_call",
    "has_motion_module",
    "is_motion_module",
    "is_video_call",
    "load_video_pipeline",
    "read_video_index",
]

VIDEO_NAME = "embedded-video"
"""Model name of the embedded model with its motion module."""

FRAMES = 16
"""Frames of a training video, and the largest number that the motion module supports."""

MIN_FRAMES = 8
"""Fewer frames show the first part of the motion."""

VIDEO_CALL_DEFAULTS = MappingProxyType({**CALL_DEFAULTS, "num_frames": FRAMES})

# Motions in the training data, with the wordings of the captions.
MOTIONS: MappingProxyType[str, tuple[str, ...]] = MappingProxyType(
    {
        "left": ("flying to the left", "moving to the left", "moving left", "going left", "flying left"),
        "right": ("flying to the right", "moving to the right", "moving right", "going right", "flying right"),
        "up": ("flying up", "moving up", "going up", "rising", "moving upwards"),
        "down": ("falling", "moving down", "going down", "falling down", "moving downwards"),
        "bounce": ("bouncing", "bouncing up and down", "jumping", "hopping", "jumping up and down"),
        "spin": ("spinning", "rotating", "spinning around", "turning around", "rotating clockwise"),
        "grow": ("growing", "getting bigger", "getting larger", "becoming larger", "growing bigger"),
        "shrink": ("shrinking", "getting smaller", "becoming smaller", "growing smaller"),
        "shake": ("shaking", "trembling", "vibrating", "shaking from side to side"),
        "fade": ("fading out", "fading away", "disappearing", "vanishing", "fading"),
    }
)

LORA_FILE = "pytorch_lora_weights.safetensors"  # diffusers' default name
_FOLDER = Path(__file__).parent / "motion"
_CONFIG = "config.json"
_PIPELINE, _ADAPTER = "AnimateDiffPipeline", "MotionAdapter"
# Components of the image model that AnimateDiffPipeline has, too.
_SHARED = ("vae", "text_encoder", "tokenizer", "unet", "scheduler")
# Call arguments that only videos have.
_LENGTHS = ("frames", "num_frames", "fps", "seconds")


def is_video_call(call: Mapping[str, Any]) -> bool:
    """Return whether a call sets the length or the frame rate of a video."""
    return any(call.get(name) is not None for name in _LENGTHS)


def choose_name(name: str | os.PathLike[str] | None, call: Mapping[str, Any]) -> str | os.PathLike[str] | None:
    """Return the model name for a call: the embedded model uses its motion module for videos."""
    return VIDEO_NAME if name in (None, NAME) and is_video_call(call) else name


def fit_video_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call with the number of frames and the frame rate for a duration; without `fps`, all frames are used.

    Raise UsageError if the call requests too few or too many frames.
    """
    fitted = dict(call)
    seconds, fps = call.get("seconds"), call.get("fps")
    requested = [call[name] for name in ("frames", "num_frames") if call.get(name) is not None]
    if seconds is not None and not requested:
        requested = [FRAMES if fps is None else max(1, round(seconds * fps))]
        fitted = {name: value for name, value in call.items() if name != "seconds"}
        fitted |= {"frames": requested[0], "fps": FRAMES / seconds if fps is None else fps}
    if len(requested) > 1 and requested[0] != requested[1]:
        raise UsageError("frames and num_frames cannot be combined", hint="pass one of them")
    for frames in requested:
        if not isinstance(frames, int) or isinstance(frames, bool):
            raise UsageError(f"the number of frames must be an integer, not {frames!r}", hint=f"use {FRAMES}")
        if not MIN_FRAMES <= frames <= FRAMES:
            raise UsageError(
                f"the embedded model generates videos of {MIN_FRAMES} to {FRAMES} frames, not {frames}",
                hint=f"use --frames {FRAMES} (frames={FRAMES}); set the duration with --seconds or --fps alone",
            )
    return fitted


def is_motion_module(folder: str | os.PathLike[str]) -> bool:
    """Return whether a folder contains a motion module for the embedded model."""
    path = Path(folder).expanduser()
    if not (path / LORA_FILE).is_file() or not (path / _CONFIG).is_file():
        return False
    try:
        config = json.loads((path / _CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get("_class_name") == _ADAPTER


def has_motion_module() -> bool:
    """Return whether the package includes the motion module."""
    return is_motion_module(_FOLDER)


def find_motion_module(folder: Path | None = None) -> Path:
    """Return the folder with the motion module: `folder`, or the one in the package."""
    folder = folder or _FOLDER
    if not is_motion_module(folder):
        raise ModelError(
            f"the embedded model cannot generate videos: its motion module is not part of this version ({folder})",
            hint="omit --frames for an image, or select a text-to-video model with --model",
        )
    return folder


def read_video_index() -> dict[str, Any]:
    """Return the index of the video pipeline, like the content of a `model_index.json`."""
    index = json.loads((find_embedded_model() / "model_index.json").read_text(encoding="utf-8"))
    shared = {name: index[name] for name in _SHARED}
    return {"_class_name": _PIPELINE, **shared, "motion_adapter": ["diffusers", _ADAPTER]}


def load_video_pipeline(folder: Path | None = None, image_model: Path | None = None, **options: Any) -> Any:
    """Return a diffusers `AnimateDiffPipeline` of the embedded model with its motion module, on the CPU.

    `image_model` replaces the embedded model; `options` are passed to `from_pretrained`.
    """
    folder = find_motion_module(folder)
    import diffusers

    load_adapter: Any = diffusers.MotionAdapter.from_pretrained
    load: Any = diffusers.AnimateDiffPipeline.from_pretrained
    adapter = load_adapter(folder, **options)
    pipe = load(image_model or find_embedded_model(), motion_adapter=adapter, **options)
    _fuse_lora(pipe, folder / LORA_FILE)
    return pipe


def _fuse_lora(pipe: Any, path: Path) -> None:
    """Add the low-rank updates in a LoRA file to the weights, as `load_lora_weights` and `fuse_lora` do with peft.

    peft is not a dependency of anyaccel.
    """
    import torch
    from safetensors.torch import load_file

    tensors = load_file(path)
    for name, down in tensors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        target = name.removesuffix(".lora_A.weight")
        component, _, module = target.partition(".")
        weight = getattr(pipe, component).get_submodule(module).weight
        up = tensors[f"{target}.lora_B.weight"]
        update = (up.flatten(1).float() @ down.flatten(1).float()).view_as(weight)
        with torch.no_grad():
            weight.copy_(weight.float() + update)
