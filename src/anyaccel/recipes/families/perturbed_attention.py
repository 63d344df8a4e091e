"""Recipes for tiny pipelines with perturbed-attention guidance (PAG)."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.families import (
    animate_diff,
    controlnet,
    hunyuan_dit,
    pixart,
    sana,
    stable_diffusion,
    stable_diffusion_3,
    stable_diffusion_xl,
)
from anyaccel.recipes.parts.calls import make_image, mask, prompted
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 16

recipe = functools.partial(make_recipe, family="perturbed-attention")


def call(**more: Any) -> dict[str, Any]:
    """Return call arguments for generating a 16x16 image from pure noise with PAG."""
    return prompted(height=SIZE, width=SIZE, pag_scale=3.0) | more


def call_halfway(**more: Any) -> dict[str, Any]:
    """Return call arguments for image-to-image with PAG at strength 0.5.

    The pipeline runs the last two of four steps.
    """
    return prompted(image=make_image(SIZE), strength=0.5, num_inference_steps=4, pag_scale=3.0, **more)


RECIPES = (
    recipe(
        name="pag-stable-diffusion",
        pipeline="StableDiffusionPAGPipeline",
        parts=stable_diffusion.parts,
        call=call,
    ),
    recipe(
        name="pag-stable-diffusion-image-to-image",
        pipeline="StableDiffusionPAGImg2ImgPipeline",
        parts=stable_diffusion.parts,
        call=call_halfway,
    ),
    recipe(
        name="pag-stable-diffusion-inpaint",
        pipeline="StableDiffusionPAGInpaintPipeline",
        parts=stable_diffusion.parts,
        call=lambda: call_halfway(mask_image=mask(SIZE), height=SIZE, width=SIZE),
    ),
    recipe(
        name="pag-stable-diffusion-xl",
        pipeline="StableDiffusionXLPAGPipeline",
        parts=stable_diffusion_xl.parts,
        call=call,
    ),
    recipe(
        name="pag-stable-diffusion-xl-image-to-image",
        pipeline="StableDiffusionXLPAGImg2ImgPipeline",
        parts=stable_diffusion_xl.parts,
        call=call_halfway,
    ),
    recipe(
        name="pag-stable-diffusion-xl-inpaint",
        pipeline="StableDiffusionXLPAGInpaintPipeline",
        parts=stable_diffusion_xl.parts,
        call=lambda: call_halfway(mask_image=mask(SIZE), height=SIZE, width=SIZE),
    ),
    recipe(
        name="pag-stable-diffusion-3",
        pipeline="StableDiffusion3PAGPipeline",
        parts=stable_diffusion_3.parts,
        call=lambda: call(max_sequence_length=32),
    ),
    recipe(
        name="pag-stable-diffusion-3-image-to-image",
        pipeline="StableDiffusion3PAGImg2ImgPipeline",
        parts=stable_diffusion_3.parts,
        call=lambda: call_halfway(max_sequence_length=32, height=SIZE, width=SIZE),
    ),
    recipe(
        name="pag-controlnet",
        pipeline="StableDiffusionControlNetPAGPipeline",
        parts=controlnet.parts,
        call=lambda: call(image=make_image(SIZE)),
    ),
    recipe(
        name="pag-controlnet-inpaint",
        pipeline="StableDiffusionControlNetPAGInpaintPipeline",
        parts=controlnet.parts,
        call=lambda: call_halfway(mask_image=mask(SIZE), control_image=make_image(SIZE, seed=2)),
    ),
    recipe(
        name="pag-controlnet-xl",
        pipeline="StableDiffusionXLControlNetPAGPipeline",
        parts=controlnet.parts_xl,
        call=lambda: call(image=make_image(SIZE)),
    ),
    recipe(
        name="pag-controlnet-xl-image-to-image",
        pipeline="StableDiffusionXLControlNetPAGImg2ImgPipeline",
        parts=controlnet.parts_xl,
        call=lambda: call_halfway(control_image=make_image(SIZE, seed=2)),
    ),
    recipe(
        name="pag-hunyuan-dit",
        pipeline="HunyuanDiTPAGPipeline",
        parts=hunyuan_dit.parts,
        call=lambda: hunyuan_dit.call(pag_scale=3.0),
    ),
    recipe(
        name="pag-pixart-sigma",
        pipeline="PixArtSigmaPAGPipeline",
        parts=pixart.parts,
        call=lambda: pixart.call() | {"pag_scale": 3.0},
    ),
    recipe(
        name="pag-sana",
        pipeline="SanaPAGPipeline",
        parts=sana.parts,
        call=lambda: sana.call(pag_scale=3.0),
    ),
    recipe(
        name="pag-animate-diff",
        pipeline="AnimateDiffPAGPipeline",
        parts=animate_diff.parts,
        call=lambda: animate_diff.call(pag_scale=3.0),
    ),
)
