"""Recipes for tiny Marigold pipelines.

The pipelines estimate depth, surface normals or an intrinsic decomposition from an image.
"""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.families.stable_diffusion import denoiser, scheduler
from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.autoencoders import autoencoder_kl
from anyaccel.recipes.parts.calls import make_image, unprompted
from anyaccel.recipes.parts.text_encoders import clip_text
from anyaccel.recipes.parts.tokenizers import clip_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 16

recipe = functools.partial(make_recipe, family="marigold")


def parts(*, maps: int = 1, **more: Any) -> dict[str, Any]:
    """Return the components of a tiny Marigold pipeline that predicts `maps` maps.

    The UNet receives the latents of the input image and the noisy latents of the maps.
    """
    return {
        "unet": denoiser(in_channels=4 + 4 * maps, out_channels=4 * maps, use_linear_projection=True),
        "vae": autoencoder_kl(),
        "scheduler": diffusers.DDIMScheduler(**scheduler(prediction_type="v_prediction", clip_sample=False)),
        "text_encoder": clip_text(),
        "tokenizer": clip_tokenizer(),
    } | more


def intrinsics() -> dict[str, Any]:
    """Return the components of a tiny Marigold pipeline that predicts albedo and material maps."""
    names = {
        "target_names": ["albedo", "material"],
        "albedo": {"prediction_space": "srgb"},
        "material": {"prediction_space": "stack", "sub_target_names": ["roughness", "metallicity", None]},
    }
    return parts(maps=2, prediction_type="intrinsics", target_properties=names)


def call() -> dict[str, Any]:
    """Return call arguments that process the image at its original size."""
    return unprompted(image=make_image(SIZE), processing_resolution=0)


RECIPES = (
    recipe(
        name="marigold-depth",
        pipeline="MarigoldDepthPipeline",
        parts=lambda: parts(prediction_type="depth"),
        call=call,
    ),
    recipe(
        name="marigold-normals",
        pipeline="MarigoldNormalsPipeline",
        parts=lambda: parts(prediction_type="normals"),
        call=call,
    ),
    recipe(name="marigold-intrinsics", pipeline="MarigoldIntrinsicsPipeline", parts=intrinsics, call=call),
)
