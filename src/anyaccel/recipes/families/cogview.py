"""Recipes for tiny CogView3-Plus and CogView4 pipelines."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.autoencoders import autoencoder_kl
from anyaccel.recipes.parts.calls import make_image, prompted
from anyaccel.recipes.parts.language_models import glm
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH, t5_encoder
from anyaccel.recipes.parts.tokenizers import glm_tokenizer, t5_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 16

recipe = functools.partial(make_recipe, family="cogview")


def transformer_shape(**more: Any) -> dict[str, Any]:
    """Return the constructor arguments shared by the CogView3-Plus and CogView4 transformers."""
    return {
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 8,
        "num_attention_heads": 2,
        "text_embed_dim": TEXT_WIDTH,
        "time_embed_dim": 16,
        "condition_dim": 4,
        "pos_embed_max_size": 8,
        "sample_size": SIZE // 2,
    } | more


def parts() -> dict[str, Any]:
    """Return the components of a tiny CogView3-Plus pipeline."""
    return {
        "tokenizer": t5_tokenizer(),
        "text_encoder": t5_encoder(),
        "vae": autoencoder_kl(),
        "transformer": diffusers.CogView3PlusTransformer2DModel(**transformer_shape()),
        "scheduler": diffusers.CogVideoXDDIMScheduler(
            prediction_type="v_prediction", rescale_betas_zero_snr=True, timestep_spacing="trailing"
        ),
    }


def parts_of_version_4(*, in_channels: int = 4) -> dict[str, Any]:
    """Return the components of a tiny CogView4 pipeline.

    The pipeline with a control image needs twice as many input channels in the transformer.
    """
    shape = transformer_shape(in_channels=in_channels, rope_axes_dim=(8, 8))
    return {
        "tokenizer": glm_tokenizer(),
        "text_encoder": glm(),
        "vae": autoencoder_kl(),
        "transformer": diffusers.CogView4Transformer2DModel(**shape),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(
            base_shift=0.25, max_shift=0.75, use_dynamic_shifting=True
        ),
    }


RECIPES = (
    recipe(
        name="cogview-3-plus",
        pipeline="CogView3PlusPipeline",
        parts=parts,
        call=lambda: prompted(height=SIZE, width=SIZE, max_sequence_length=32),
    ),
    recipe(
        name="cogview-4",
        pipeline="CogView4Pipeline",
        parts=parts_of_version_4,
        call=lambda: prompted(height=SIZE, width=SIZE, max_sequence_length=32),
    ),
    recipe(
        name="cogview-4-control",
        pipeline="CogView4ControlPipeline",
        parts=lambda: parts_of_version_4(in_channels=8),
        call=lambda: prompted(height=SIZE, width=SIZE, max_sequence_length=32, control_image=make_image(SIZE)),
    ),
)
