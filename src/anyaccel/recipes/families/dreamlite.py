"""Recipes for tiny DreamLite pipelines: with guidance and distilled for mobile devices."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.families.flux import flow_scheduler
from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.calls import make_image, prompted, unprompted
from anyaccel.recipes.parts.language_models import qwen_3_vl
from anyaccel.recipes.parts.processors import qwen_3_vl_processor
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH
from anyaccel.recipes.parts.tokenizers import qwen_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 16

recipe = functools.partial(make_recipe, family="dreamlite")


def parts() -> dict[str, Any]:
    """Return the components of a tiny DreamLite pipeline.

    The UNet has separable convolutions and grouped-query attention. It receives the noise and the image side by side.
    """
    return {
        "text_encoder": qwen_3_vl(),
        "tokenizer": qwen_tokenizer(),
        "processor": qwen_3_vl_processor(),
        "vae": diffusers.AutoencoderTiny(
            encoder_block_out_channels=(8, 8),
            decoder_block_out_channels=(8, 8),
            num_encoder_blocks=(1, 1),
            num_decoder_blocks=(1, 1),
        ),
        "unet": diffusers.DreamLiteUNetModel(
            block_out_channels=(8, 16),
            layers_per_block=1,
            down_block_types=("DreamLiteCrossAttnNoSelfAttnDownBlock2D", "DreamLiteCrossAttnDownBlock2D"),
            up_block_types=("DreamLiteCrossAttnUpBlock2D", "DreamLiteCrossAttnNoSelfAttnUpBlock2D"),
            attention_head_dim=(2, 4),
            norm_num_groups=4,
            cross_attention_dim=TEXT_WIDTH,
            addition_embed_type="time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=16,
        ),
        "scheduler": flow_scheduler(),
    }


RECIPES = (
    recipe(
        name="dreamlite",
        pipeline="DreamLitePipeline",
        parts=parts,
        call=lambda: prompted(image=make_image(SIZE), negative_prompt="blue", height=SIZE, width=SIZE),
    ),
    recipe(
        name="dreamlite-mobile",
        pipeline="DreamLiteMobilePipeline",
        parts=parts,
        call=lambda: unprompted(prompt="a red fox", height=SIZE, width=SIZE),
    ),
)
