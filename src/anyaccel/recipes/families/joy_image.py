"""Recipes for tiny JoyImage pipelines: editing one image and editing several images."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.families.wan import CHANNELS, autoencoder_wan
from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.calls import make_image, prompted
from anyaccel.recipes.parts.language_models import qwen_3_vl
from anyaccel.recipes.parts.processors import qwen_3_vl_processor
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH
from anyaccel.recipes.parts.tokenizers import qwen_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 128
PATCH = 32

recipe = functools.partial(make_recipe, family="joy-image")


def parts(transformer: str) -> dict[str, Any]:
    """Return the components of a tiny JoyImage pipeline with the given transformer class."""
    return {
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=4.0),
        # The pipelines resize images to about a million pixels. The autoencoder splits them into 32 x 32 patches.
        "vae": autoencoder_wan(
            halvings=0,
            patch_size=PATCH,
            in_channels=3 * PATCH**2,
            out_channels=3 * PATCH**2,
            scale_factor_spatial=PATCH,
        ),
        "text_encoder": qwen_3_vl(),
        "tokenizer": qwen_tokenizer(),
        "transformer": getattr(diffusers, transformer)(
            in_channels=CHANNELS,
            hidden_size=32,
            num_attention_heads=2,
            text_dim=TEXT_WIDTH,
            num_layers=2,
            rope_dim_list=[4, 6, 6],
        ),
        "processor": qwen_3_vl_processor(),
    }


RECIPES = (
    recipe(
        name="joy-image-edit",
        pipeline="JoyImageEditPipeline",
        parts=lambda: parts("JoyImageEditTransformer3DModel"),
        call=lambda: prompted(image=make_image(SIZE), negative_prompt="blue"),
    ),
    recipe(
        name="joy-image-edit-plus",
        pipeline="JoyImageEditPlusPipeline",
        parts=lambda: parts("JoyImageEditPlusTransformer3DModel"),
        # The pipeline resizes the images, but not the output.
        call=lambda: prompted(images=[make_image(SIZE)], negative_prompt="blue", height=SIZE, width=SIZE),
    ),
)
