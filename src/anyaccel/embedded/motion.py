"""Motion module of the embedded model, which generates videos: its location, call arguments and motion words.

The folder `motion` contains a diffusers `MotionAdapter` and a LoRA file for the UNet and the text encoder, both written
by `python -m training motion`. This version of anyaccel does not include the folder.
"""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any

from anyaccel.embedded.model import CALL_DEFAULTS, find_embedded_model
from anyaccel.errors import ModelError

__all__ = ["FRAMES", "LORA_FILE", "MOTIONS", "VIDEO_CALL_DEFAULTS", "find_motion_module", "load_video_pipeline"]

FRAMES = 16
"""Frames of a training video; the motion module supports no other number."""

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


def find_motion_module(folder: Path | None = None) -> Path:
    """Return the folder with the motion module: `folder`, or the one in the package."""
    folder = folder or _FOLDER
    if not (folder / "config.json").is_file() or not (folder / LORA_FILE).is_file():
        raise ModelError(
            f"the embedded model cannot generate videos: its motion module is not part of this version ({folder})",
            hint="omit --frames for an image, or select a text-to-video model with --model",
        )
    return folder


def load_video_pipeline(folder: Path | None = None, image_model: Path | None = None, **options: Any) -> Any:
    """Return a diffusers `AnimateDiffPipeline` of the embedded model with its motion module, on the CPU.

    `image_model` replaces the embedded model; `options` are passed to `from_pretrained`.
    """
    folder = find_motion_module(folder)
    import diffusers

    load_adapter: Any = diffusers.MotionAdapter.from_pretrained
    load: Any = diffusers.AnimateDiffPipeline.from_pretrained
    pipe = load(image_model or find_embedded_model(), motion_adapter=load_adapter(folder), **options)
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
        with torch.no_grad():
            weight += (up.flatten(1).float() @ down.flatten(1).float()).view_as(weight).to(weight)
