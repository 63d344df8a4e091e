"""Recipes for tiny LEDITS++ pipelines, which invert an image and then edit it: Stable Diffusion and SDXL."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.families import stable_diffusion, stable_diffusion_xl
from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.autoencoders import autoencoder_kl
from anyaccel.recipes.parts.calls import generator, make_image
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

# The pipelines accept only multiples of 32.
SIZE = 32

recipe = functools.partial(make_recipe, family="ledits-pp")


def scheduler() -> Any:
    """Return the multistep scheduler with noise that the pipelines use by default."""
    return diffusers.DPMSolverMultistepScheduler(
        **stable_diffusion.scheduler(algorithm_type="sde-dpmsolver++", solver_order=2)
    )


def parts() -> dict[str, Any]:
    """Return the components of a tiny LEDITS++ pipeline with Stable Diffusion.

    The pipeline finds the part to edit in the cross-attention at a quarter of the latents' resolution.
    """
    unet = stable_diffusion.denoiser(
        block_out_channels=(8, 8, 16),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    )
    return stable_diffusion.parts(scheduler=scheduler(), vae=autoencoder_kl(sample_size=SIZE), unet=unet)


def parts_of_xl() -> dict[str, Any]:
    """Return the components of a tiny LEDITS++ pipeline with SDXL."""
    return stable_diffusion_xl.parts(
        scheduler=scheduler(), vae=autoencoder_kl(sample_size=SIZE, scaling_factor=0.13025)
    )


def invert(pipe: Any) -> None:
    """Invert an image: find noise from which the pipeline recreates it."""
    pipe.invert(image=make_image(SIZE), source_prompt="a cat", num_inversion_steps=4, generator=generator())


def call(**more: Any) -> dict[str, Any]:
    """Return call arguments for an edit of the inverted image, which is guided from the first step on."""
    return {
        "editing_prompt": ["a red fox"],
        "edit_guidance_scale": 5.0,
        "edit_warmup_steps": 0,
        "edit_threshold": 0.7,
        "output_type": "np",
    } | more


RECIPES = (
    recipe(
        name="ledits-pp-stable-diffusion",
        pipeline="LEditsPPPipelineStableDiffusion",
        parts=parts,
        prepare=invert,
        call=lambda: call(generator=generator()),
    ),
    recipe(
        name="ledits-pp-stable-diffusion-xl",
        pipeline="LEditsPPPipelineStableDiffusionXL",
        parts=parts_of_xl,
        prepare=invert,
        call=call,
    ),
)
