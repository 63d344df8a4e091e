"""Recipes for tiny modular Qwen-Image pipelines that read an image: Edit, Edit Plus, Layered, 2.1 and 2.1 Turbo."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.families import qwen_image
from anyaccel.recipes.families.flux import flow_scheduler
from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.calls import make_image, unprompted
from anyaccel.recipes.parts.language_models import qwen_3_vl
from anyaccel.recipes.parts.processors import qwen_2_vl_processor, qwen_3_vl_processor
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 128
# The text encoder of version 2.1 must not resize the image: its tokens of 32 pixels become 2 x 2 latents of 16 pixels.
SIZE_2_1 = 64

recipe = functools.partial(make_recipe, family="qwen-image")


def parts_of_edit(**more: Any) -> dict[str, Any]:
    """Return the components of a tiny modular pipeline for editing, whose text encoder also reads the image."""
    # The pipelines resize the image to about a million pixels. With 32x compression, that is 256 tokens, and without
    # residual blocks outside of the middle, encoding takes less than a second.
    vae = qwen_image.autoencoder_qwen(
        base_dim=4, dim_mult=[1] * 6, num_res_blocks=0, temperal_downsample=[False] * 5, **more
    )
    components = qwen_image.parts(processor=qwen_2_vl_processor(), vae=vae)
    del components["tokenizer"]  # the processor has one
    return components


def parts_of_layers() -> dict[str, Any]:
    """Return the components of a tiny modular pipeline that splits an image into layers with transparency."""
    shape = qwen_image.transformer_shape(use_additional_t_cond=True, use_layer3d_rope=True)
    return parts_of_edit(input_channels=4) | {
        "tokenizer": qwen_image.parts()["tokenizer"],
        "transformer": diffusers.QwenImageTransformer2DModel(**shape),
    }


def parts_of_version_2_1() -> dict[str, Any]:
    """Return the components of a tiny modular Qwen-Image 2.1 pipeline, with 16x compression and an alpha channel."""
    return {
        "text_encoder": qwen_3_vl(),
        "processor": qwen_3_vl_processor(),
        "vae": diffusers.AutoencoderKLQwenImage21(
            base_dim=4,
            decoder_base_dim=4,
            z_dim=8,
            dim_mult=[1] * 5,
            num_res_blocks=1,
            latents_mean=[0.0] * 8,
            latents_std=[1.0] * 8,
        ),
        "scheduler": flow_scheduler(),
        "transformer": diffusers.QwenImage21Transformer2DModel(
            in_channels=8,
            out_channels=8,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            context_in_dim=TEXT_WIDTH,
            axes_dims_rope=(4, 6, 6),
        ),
    }


def call(**more: Any) -> dict[str, Any]:
    """Return call arguments for editing, with a width and height of two tokens."""
    return unprompted(output="images", prompt="a red fox", image=make_image(SIZE), height=SIZE, width=SIZE) | more


def call_edit() -> dict[str, Any]:
    """Return call arguments with a negative prompt, for pipelines with guidance."""
    return call(negative_prompt="blue")


def call_layers() -> dict[str, Any]:
    """Return call arguments for splitting an image into two layers, whose size the pipeline chooses."""
    arguments = call(image=make_image(SIZE).convert("RGBA"), negative_prompt="blue", layers=2)
    return {name: value for name, value in arguments.items() if name not in ("height", "width")}


def call_version_2_1() -> dict[str, Any]:
    """Return call arguments without guidance, which is the default of version 2.1."""
    return call(image=make_image(SIZE_2_1), height=SIZE_2_1, width=SIZE_2_1, output_resolution=SIZE_2_1)


RECIPES = (
    recipe(
        name="qwen-image-edit-modular",
        pipeline="QwenImageEditModularPipeline",
        parts=parts_of_edit,
        call=call_edit,
    ),
    recipe(
        name="qwen-image-edit-plus-modular",
        pipeline="QwenImageEditPlusModularPipeline",
        parts=parts_of_edit,
        call=call_edit,
    ),
    recipe(
        name="qwen-image-layered-modular",
        pipeline="QwenImageLayeredModularPipeline",
        parts=parts_of_layers,
        call=call_layers,
    ),
    recipe(
        name="qwen-image-2-1-modular",
        pipeline="QwenImage21ModularPipeline",
        parts=parts_of_version_2_1,
        call=call_version_2_1,
    ),
    recipe(
        name="qwen-image-2-1-turbo-modular",
        pipeline="QwenImage21TurboModularPipeline",
        parts=parts_of_version_2_1,
        call=call_version_2_1,
    ),
)
