"""Recipe for a tiny Krea 2 pipeline."""

from __future__ import annotations

from typing import Any

from anyaccel.recipes.families.flux import flow_scheduler
from anyaccel.recipes.families.qwen_image import autoencoder_qwen
from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.calls import prompted
from anyaccel.recipes.parts.language_models import qwen_3_vl_model
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH
from anyaccel.recipes.parts.tokenizers import qwen_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 16


def parts() -> dict[str, Any]:
    """Return the components of a tiny Krea 2 pipeline.

    The transformer receives the hidden states of several Qwen3-VL layers.
    """
    return {
        "scheduler": flow_scheduler(),
        "vae": autoencoder_qwen(),
        "text_encoder": qwen_3_vl_model(),
        "tokenizer": qwen_tokenizer(),
        "transformer": diffusers.Krea2Transformer2DModel(
            in_channels=16,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=64,
            timestep_embed_dim=32,
            text_hidden_dim=TEXT_WIDTH,
            num_text_layers=2,
            text_num_attention_heads=2,
            text_num_key_value_heads=2,
            text_intermediate_size=64,
            num_layerwise_text_blocks=1,
            num_refiner_text_blocks=1,
            axes_dims_rope=(4, 6, 6),
        ),
        "text_encoder_select_layers": (1, 2),
    }


RECIPES = (
    make_recipe(
        name="krea-2",
        pipeline="Krea2Pipeline",
        family="krea",
        parts=parts,
        call=lambda: prompted(negative_prompt="blue", height=SIZE, width=SIZE, max_sequence_length=256),
    ),
)
