"""Recipes for tiny EasyAnimate pipelines: text-to-video and inpainting."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.calls import embedding, prompted
from anyaccel.recipes.parts.language_models import qwen_2_vl
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH
from anyaccel.recipes.parts.tokenizers import qwen_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 16

recipe = functools.partial(make_recipe, family="easy-animate")


def parts(*, in_channels: int = 4) -> dict[str, Any]:
    """Return the components of a tiny EasyAnimate 5.1 pipeline.

    Inpainting requires additional input channels for a mask and a masked video.
    """
    return {
        "vae": diffusers.AutoencoderKLMagvit(
            latent_channels=4,
            block_out_channels=(8, 8, 8, 8),
            down_block_types=(
                "SpatialDownBlock3D",
                "SpatialTemporalDownBlock3D",
                "SpatialTemporalDownBlock3D",
                "SpatialTemporalDownBlock3D",
            ),
            up_block_types=(
                "SpatialUpBlock3D",
                "SpatialTemporalUpBlock3D",
                "SpatialTemporalUpBlock3D",
                "SpatialTemporalUpBlock3D",
            ),
            layers_per_block=1,
            norm_num_groups=2,
            spatial_group_norm=False,
        ),
        "text_encoder": qwen_2_vl(),
        "tokenizer": qwen_tokenizer(),
        "transformer": diffusers.EasyAnimateTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=in_channels,
            out_channels=4,
            patch_size=2,
            sample_width=SIZE // 8,
            sample_height=SIZE // 8,
            num_layers=1,
            mmdit_layers=1,
            time_embed_dim=2,
            text_embed_dim=TEXT_WIDTH,
            # With True, inpainting reads a config field that the autoencoder does not have.
            resize_inpaint_mask_directly=False,
        ),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(),
    }


def call() -> dict[str, Any]:
    """Return call arguments for a five-frame video."""
    return prompted(negative_prompt="blue", height=SIZE, width=SIZE, num_frames=5)


RECIPES = (
    recipe(
        name="easy-animate",
        pipeline="EasyAnimatePipeline",
        parts=parts,
        call=call,
    ),
    recipe(
        name="easy-animate-inpaint",
        pipeline="EasyAnimateInpaintPipeline",
        parts=lambda: parts(in_channels=12),
        call=lambda: (
            call()
            | {
                "video": embedding(1, 3, 5, SIZE, SIZE).sigmoid(),
                "mask_video": 255.0 * (embedding(1, 1, 5, SIZE, SIZE) > 0).float(),
            }
        ),
    ),
)
