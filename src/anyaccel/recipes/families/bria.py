"""Recipes for tiny Bria and Bria FIBO pipelines."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.families.flux import flow_scheduler
from anyaccel.recipes.families.wan import CHANNELS, autoencoder_wan
from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.autoencoders import autoencoder_kl
from anyaccel.recipes.parts.calls import prompted
from anyaccel.recipes.parts.language_models import smol_lm
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH, t5_encoder
from anyaccel.recipes.parts.tokenizers import qwen_tokenizer, t5_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 16

recipe = functools.partial(make_recipe, family="bria")


def parts() -> dict[str, Any]:
    """Return the components of a tiny Bria pipeline, a FLUX variant with T5 as its only text encoder."""
    return {
        "transformer": diffusers.BriaTransformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=TEXT_WIDTH,
            axes_dims_rope=[4, 4, 8],
        ),
        "scheduler": flow_scheduler(),
        "vae": autoencoder_kl(shift_factor=0.0),
        "text_encoder": t5_encoder(),
        "tokenizer": t5_tokenizer(),
    }


def parts_of_fibo() -> dict[str, Any]:
    """Return the components of a tiny Bria FIBO pipeline.

    Each transformer block receives the hidden states of a different language model layer.
    """
    return {
        "transformer": diffusers.BriaFiboTransformer2DModel(
            in_channels=CHANNELS,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=2 * TEXT_WIDTH,
            axes_dims_rope=[4, 4, 8],
            text_encoder_dim=TEXT_WIDTH,
        ),
        "scheduler": flow_scheduler(),
        "vae": autoencoder_wan(),
        "text_encoder": smol_lm(),
        "tokenizer": qwen_tokenizer(),
    }


RECIPES = (
    recipe(
        name="bria-fibo",
        pipeline="BriaFiboPipeline",
        parts=parts_of_fibo,
        # The pipeline assumes an autoencoder with 16x compression.
        call=lambda: prompted(negative_prompt="blue", height=128, width=128, max_sequence_length=64),
    ),
    recipe(
        name="bria",
        pipeline="BriaPipeline",
        parts=parts,
        call=lambda: prompted(height=SIZE, width=SIZE, max_sequence_length=32),
    ),
)
