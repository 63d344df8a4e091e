"""Recipes for tiny LongCat-Image pipelines: text-to-image and editing."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.families.flux import flow_scheduler
from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.autoencoders import autoencoder_kl
from anyaccel.recipes.parts.calls import make_image, prompted
from anyaccel.recipes.parts.language_models import qwen_2_5_vl
from anyaccel.recipes.parts.processors import qwen_2_vl_processor
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH
from anyaccel.recipes.parts.tokenizers import qwen_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 16

recipe = functools.partial(make_recipe, family="longcat-image")


def parts(**more: Any) -> dict[str, Any]:
    """Return the components of a tiny LongCat-Image pipeline.

    The text processor is omitted, because the pipeline uses it only to rewrite prompts.
    """
    return {
        "scheduler": flow_scheduler(),
        "vae": autoencoder_kl(latent_channels=16, shift_factor=0.1159),
        "text_encoder": qwen_2_5_vl(),
        "tokenizer": qwen_tokenizer(),
        "text_processor": None,
        "transformer": diffusers.LongCatImageTransformer2DModel(
            in_channels=64,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=TEXT_WIDTH,
            pooled_projection_dim=TEXT_WIDTH,
            axes_dims_rope=[4, 6, 6],
        ),
    } | more


def parts_of_edit() -> dict[str, Any]:
    """Return the components of a tiny pipeline for editing, which also shows the image to the text encoder."""
    # The pipeline resizes the image to about a million pixels. With 32x compression, that is 256 tokens.
    vae = autoencoder_kl(
        latent_channels=16,
        shift_factor=0.1159,
        block_out_channels=(4,) * 6,
        down_block_types=("DownEncoderBlock2D",) * 6,
        up_block_types=("UpDecoderBlock2D",) * 6,
        mid_block_add_attention=False,
    )
    return parts(vae=vae, text_processor=qwen_2_vl_processor())


RECIPES = (
    recipe(
        name="longcat-image",
        pipeline="LongCatImagePipeline",
        parts=parts,
        call=lambda: prompted(height=SIZE, width=SIZE, enable_prompt_rewrite=False),
    ),
    recipe(
        name="longcat-image-edit",
        pipeline="LongCatImageEditPipeline",
        parts=parts_of_edit,
        call=lambda: prompted(image=make_image(SIZE), negative_prompt="blue"),
    ),
)
