"""Recipes for tiny latent consistency models: text-to-image and image-to-image."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.families import stable_diffusion
from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.calls import make_image, prompted
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 16

recipe = functools.partial(make_recipe, family="latent-consistency")


def parts() -> dict[str, Any]:
    """Return the components of a tiny latent consistency model.

    It is a Stable Diffusion pipeline with a UNet that receives the guidance scale as an embedding.
    """
    return stable_diffusion.parts(
        unet=stable_diffusion.denoiser(time_cond_proj_dim=8),
        scheduler=diffusers.LCMScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False
        ),
    )


RECIPES = (
    recipe(
        name="latent-consistency",
        pipeline="LatentConsistencyModelPipeline",
        parts=parts,
        call=lambda: prompted(height=SIZE, width=SIZE),
    ),
    recipe(
        name="latent-consistency-image-to-image",
        pipeline="LatentConsistencyModelImg2ImgPipeline",
        parts=parts,
        call=lambda: prompted(image=make_image(SIZE), strength=0.5, num_inference_steps=4),
    ),
)
