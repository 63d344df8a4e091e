"""Recipes for tiny PixArt-α and PixArt-Σ pipelines."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.autoencoders import autoencoder_kl
from anyaccel.recipes.parts.calls import prompted
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH, t5_encoder
from anyaccel.recipes.parts.tokenizers import t5_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES", "parts"]

SIZE = 16

recipe = functools.partial(make_recipe, family="pixart")


def parts(*, sample_size: int = SIZE // 2) -> dict[str, Any]:
    """Return the components of a tiny PixArt pipeline.

    With a sample size of 128, the transformer is also conditioned on the image size.
    """
    return {
        "tokenizer": t5_tokenizer(),
        "text_encoder": t5_encoder(),
        "vae": autoencoder_kl(),
        "transformer": diffusers.PixArtTransformer2DModel(
            num_attention_heads=2,
            attention_head_dim=12,  # the sizes are embedded into thirds of the width
            in_channels=4,
            out_channels=8,
            num_layers=2,
            cross_attention_dim=24,
            caption_channels=TEXT_WIDTH,
            sample_size=sample_size,
            norm_num_groups=4,
            use_additional_conditions=sample_size == 128,
        ),
        "scheduler": diffusers.DPMSolverMultistepScheduler(),
    }


def call() -> dict[str, Any]:
    """Return call arguments that disable caption cleaning and resolution binning.

    Resolution binning supports only large image sizes.
    """
    return prompted(height=SIZE, width=SIZE, clean_caption=False, use_resolution_binning=False, max_sequence_length=32)


RECIPES = (
    recipe(name="pixart-alpha", pipeline="PixArtAlphaPipeline", parts=lambda: parts(sample_size=128), call=call),
    recipe(name="pixart-sigma", pipeline="PixArtSigmaPipeline", parts=parts, call=call),
)
