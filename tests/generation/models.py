"""Folders of tiny models, adapters and input files for the tests of `generate`, and calls of stock diffusers."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import diffusers
import numpy
import torch
from PIL import Image

from anyaccel.recipes import recipes
from anyaccel.recipes.families.adapters import parts_for_ip_adapter
from anyaccel.recipes.families.wan import parts_for_images
from anyaccel.recipes.recipe import assemble

LIBRARY: Any = diffusers
SIZE = 16
CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32", "seed": 7, "num_inference_steps": 2}


@functools.cache
def _root() -> Path:
    return Path(tempfile.mkdtemp(prefix="anyaccel-models-"))


@functools.cache
def save_model(name: str) -> str:
    """Save the pipeline of a recipe to a folder, once for all tests, and return its path.

    `ip-adapter-base` is Stable Diffusion with the image encoder of the recipe `ip-adapter`, without the IP-Adapter, and
    `wan-first-last` a Wan model for a first and a last frame.
    """
    folder = _root() / name
    pipe: Any = _VARIANTS[name]() if name in _VARIANTS else recipes()[name].make()
    if isinstance(pipe, LIBRARY.ModularPipeline):
        pipe.save_pretrained(str(folder), overwrite_modular_index=True)
    else:
        pipe.save_pretrained(str(folder))
    return str(folder)


@functools.cache
def save_motion_module() -> str:
    """Save a motion module for the embedded model, with random weights, once for all tests, and return its path."""
    from training.motion.model import VideoModel

    folder = _root() / "motion"
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = VideoModel(rank=2)
        for parameter in model.trained:
            if not parameter.any():  # zero, so that the module would not change the images
                parameter.normal_(std=0.3)
    model.save(folder)
    return str(folder)


def _make_ip_adapter_base() -> Any:
    return assemble("StableDiffusionPipeline", parts_for_ip_adapter)


def _make_wan_first_last() -> Any:
    def parts() -> dict[str, Any]:
        found = parts_for_images()
        config = found["image_encoder"].config
        tokens = 2 * (1 + (config.image_size // config.patch_size) ** 2)
        transformer = LIBRARY.WanTransformer3DModel(**{**found["transformer"].config, "pos_embed_seq_len": tokens})
        return {**found, "transformer": transformer}

    return assemble("WanImageToVideoPipeline", parts)


_VARIANTS = {"ip-adapter-base": _make_ip_adapter_base, "wan-first-last": _make_wan_first_last}


def call_stock(model: str, kind: str = "DiffusionPipeline", *, prompt: str | None = "a red fox", **call: Any) -> Any:
    """Return the output of stock diffusers for a call with the seed 7 and two steps."""
    pipe = getattr(LIBRARY, kind).from_pretrained(model)
    return call_pipe(pipe, prompt=prompt, **call)


def call_pipe(pipe: Any, *, prompt: str | None = "a red fox", **call: Any) -> Any:
    """Return the output of a pipeline for a call with the seed 7 and two steps."""
    pipe.set_progress_bar_config(disable=True)
    arguments = {**({} if prompt is None else {"prompt": prompt}), "num_inference_steps": 2, **call}
    return pipe(**arguments, generator=torch.Generator("cpu").manual_seed(7))


def make_image(seed: int = 0, size: int = SIZE) -> Image.Image:
    """Return an image of smooth random colors."""
    colors = numpy.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=numpy.uint8)
    return Image.fromarray(colors).resize((size, size), Image.Resampling.BICUBIC)


def make_mask(size: int = SIZE) -> Image.Image:
    """Return a mask whose right half is white."""
    mask = Image.new("L", (size, size), 0)
    mask.paste(255, (size // 2, 0, size, size))
    return mask


def pixels(frames: Any) -> Any:
    """Return an image, or the frames of a video, as one array."""
    return numpy.asarray(frames) if isinstance(frames, Image.Image) else numpy.stack([numpy.asarray(x) for x in frames])
