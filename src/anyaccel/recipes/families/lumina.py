"""Recipes for tiny Lumina-Next and Lumina Image 2.0 pipelines."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.autoencoders import autoencoder_kl
from anyaccel.recipes.parts.calls import prompted
from anyaccel.recipes.parts.language_models import gemma, gemma_2
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH
from anyaccel.recipes.parts.tokenizers import gemma_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 32

recipe = functools.partial(make_recipe, family="lumina")


def parts() -> dict[str, Any]:
    """Return the components of a tiny Lumina-Next pipeline."""
    return {
        "transformer": diffusers.LuminaNextDiT2DModel(
            sample_size=SIZE // 2,
            hidden_size=32,
            num_layers=2,
            num_attention_heads=4,
            num_kv_heads=2,
            multiple_of=16,
            cross_attention_dim=TEXT_WIDTH,
        ),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(),
        "vae": autoencoder_kl(),
        "text_encoder": gemma(),
        "tokenizer": gemma_tokenizer(),
    }


def parts_of_version_2() -> dict[str, Any]:
    """Return the components of a tiny Lumina Image 2.0 pipeline."""
    return {
        "transformer": diffusers.Lumina2Transformer2DModel(
            sample_size=SIZE // 2,
            in_channels=4,
            hidden_size=32,
            num_layers=2,
            num_refiner_layers=1,
            num_attention_heads=2,
            num_kv_heads=1,
            multiple_of=16,
            axes_dim_rope=(4, 6, 6),
            axes_lens=(300, 32, 32),
            cap_feat_dim=TEXT_WIDTH,
        ),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=6.0),
        "vae": autoencoder_kl(shift_factor=0.1159),
        "text_encoder": gemma_2(),
        "tokenizer": gemma_tokenizer(),
    }


RECIPES = (
    recipe(
        name="lumina",
        pipeline="LuminaPipeline",
        parts=parts,
        call=lambda: prompted(height=SIZE, width=SIZE, clean_caption=False, max_sequence_length=32),
    ),
    recipe(
        name="lumina-2",
        pipeline="Lumina2Pipeline",
        parts=parts_of_version_2,
        call=lambda: prompted(height=SIZE, width=SIZE, system_prompt="paint", max_sequence_length=48),
    ),
)
