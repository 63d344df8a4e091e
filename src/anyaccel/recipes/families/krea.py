"""Recipes for tiny Krea 2 pipelines, standard and modular."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.families.flux import flow_scheduler
from anyaccel.recipes.families.qwen_image import autoencoder_qwen
from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.calls import prompted, unprompted
from anyaccel.recipes.parts.language_models import qwen_3_vl_model
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH
from anyaccel.recipes.parts.tokenizers import qwen_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 16

recipe = functools.partial(make_recipe, family="krea")


def transformer(*, text_layers: int) -> Any:
    """Return a tiny Krea 2 transformer, which receives the hidden states of several layers of the text encoder."""
    return diffusers.Krea2Transformer2DModel(
        in_channels=16,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=64,
        timestep_embed_dim=32,
        text_hidden_dim=TEXT_WIDTH,
        num_text_layers=text_layers,
        text_num_attention_heads=2,
        text_num_key_value_heads=2,
        text_intermediate_size=64,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(4, 6, 6),
    )


def parts() -> dict[str, Any]:
    """Return the components of a tiny Krea 2 pipeline."""
    return {
        "scheduler": flow_scheduler(),
        "vae": autoencoder_qwen(),
        "text_encoder": qwen_3_vl_model(),
        "tokenizer": qwen_tokenizer(),
        "transformer": transformer(text_layers=2),
        "text_encoder_select_layers": (1, 2),
    }


def parts_of_modular() -> dict[str, Any]:
    """Return the components of a tiny modular Krea 2 pipeline, which always reads 12 of 36 layers."""
    components = parts()
    del components["text_encoder_select_layers"]
    return components | {
        "text_encoder": qwen_3_vl_model(num_hidden_layers=36),
        "transformer": transformer(text_layers=12),
    }


def call_modular(**more: Any) -> dict[str, Any]:
    """Return call arguments for a modular pipeline, whose guidance scale is that of its guider."""
    return unprompted(output="images", prompt="a red fox", height=SIZE, width=SIZE, max_sequence_length=256) | more


RECIPES = (
    recipe(
        name="krea-2",
        pipeline="Krea2Pipeline",
        parts=parts,
        call=lambda: prompted(negative_prompt="blue", height=SIZE, width=SIZE, max_sequence_length=256),
    ),
    recipe(
        name="krea-2-modular",
        pipeline="Krea2ModularPipeline",
        parts=parts_of_modular,
        call=lambda: call_modular(negative_prompt="blue"),
    ),
    recipe(
        name="krea-2-turbo-modular",
        pipeline="Krea2TurboModularPipeline",
        parts=parts_of_modular,
        call=call_modular,
    ),
)
