"""Recipes for tiny ControlNet pipelines based on Stable Diffusion and SDXL."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.families import stable_diffusion, stable_diffusion_xl
from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.calls import make_image, mask, prompted
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES", "controlnet", "parts", "parts_xl"]

SIZE = 16

recipe = functools.partial(make_recipe, family="controlnet")


def controlnet() -> Any:
    """Return a ControlNet with the architecture, but not the weights, of the tiny Stable Diffusion UNet."""
    return diffusers.ControlNetModel.from_unet(
        stable_diffusion.denoiser(), conditioning_embedding_out_channels=(8, 16), load_weights_from_unet=False
    )


def controlnet_xl() -> Any:
    """Return a ControlNet with the architecture, but not the weights, of the tiny SDXL UNet."""
    return diffusers.ControlNetModel.from_unet(
        stable_diffusion_xl.denoiser(), conditioning_embedding_out_channels=(8, 16), load_weights_from_unet=False
    )


def controlnet_union() -> Any:
    """Return a tiny ControlNet-Union model, which supports several types of condition image."""
    shape = stable_diffusion_xl.denoiser().config
    names = (
        "block_out_channels",
        "down_block_types",
        "layers_per_block",
        "cross_attention_dim",
        "attention_head_dim",
        "transformer_layers_per_block",
        "use_linear_projection",
        "addition_embed_type",
        "addition_time_embed_dim",
        "projection_class_embeddings_input_dim",
        "norm_num_groups",
    )
    return diffusers.ControlNetUnionModel(
        **{name: shape[name] for name in names},
        conditioning_embedding_out_channels=(8, 16),
        num_control_type=2,
        num_trans_channel=8,
        num_trans_head=2,
        num_proj_channel=8,
    )


def parts() -> dict[str, Any]:
    """Return the components of a tiny Stable Diffusion pipeline with a ControlNet."""
    return stable_diffusion.parts(controlnet=controlnet())


def parts_xl() -> dict[str, Any]:
    """Return the components of a tiny SDXL pipeline with a ControlNet."""
    return stable_diffusion_xl.parts(controlnet=controlnet_xl())


def parts_union() -> dict[str, Any]:
    """Return the components of a tiny SDXL pipeline with a ControlNet-Union model."""
    return stable_diffusion_xl.parts(controlnet=controlnet_union())


def call(**more: Any) -> dict[str, Any]:
    """Return call arguments for generating a 16x16 image from pure noise."""
    return prompted(height=SIZE, width=SIZE) | more


def call_halfway(**more: Any) -> dict[str, Any]:
    """Return call arguments for image-to-image with a condition image at strength 0.5.

    The pipeline runs the last two of four steps.
    """
    return prompted(
        image=make_image(SIZE), control_image=make_image(SIZE, seed=2), strength=0.5, num_inference_steps=4, **more
    )


RECIPES = (
    recipe(
        name="controlnet",
        pipeline="StableDiffusionControlNetPipeline",
        parts=parts,
        call=lambda: call(image=make_image(SIZE)),
    ),
    recipe(
        name="controlnet-image-to-image",
        pipeline="StableDiffusionControlNetImg2ImgPipeline",
        parts=parts,
        call=call_halfway,
    ),
    recipe(
        name="controlnet-inpaint",
        pipeline="StableDiffusionControlNetInpaintPipeline",
        parts=parts,
        call=lambda: call_halfway(mask_image=mask(SIZE)),
    ),
    recipe(
        name="controlnet-xl",
        pipeline="StableDiffusionXLControlNetPipeline",
        parts=parts_xl,
        call=lambda: call(image=make_image(SIZE)),
    ),
    recipe(
        name="controlnet-xl-image-to-image",
        pipeline="StableDiffusionXLControlNetImg2ImgPipeline",
        parts=parts_xl,
        call=call_halfway,
    ),
    recipe(
        name="controlnet-xl-inpaint",
        pipeline="StableDiffusionXLControlNetInpaintPipeline",
        parts=parts_xl,
        call=lambda: call_halfway(mask_image=mask(SIZE)),
    ),
    recipe(
        name="controlnet-xl-union",
        pipeline="StableDiffusionXLControlNetUnionPipeline",
        parts=parts_union,
        call=lambda: call(control_image=[make_image(SIZE)], control_mode=[0]),
    ),
    recipe(
        name="controlnet-xl-union-image-to-image",
        pipeline="StableDiffusionXLControlNetUnionImg2ImgPipeline",
        parts=parts_union,
        call=lambda: call_halfway(control_mode=[0]),
    ),
    recipe(
        name="controlnet-xl-union-inpaint",
        pipeline="StableDiffusionXLControlNetUnionInpaintPipeline",
        parts=parts_union,
        call=lambda: call_halfway(control_mode=[0], mask_image=mask(SIZE)),
    ),
)
