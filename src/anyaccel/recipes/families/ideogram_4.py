"""Recipe for a tiny Ideogram 4 pipeline."""

from __future__ import annotations

from typing import Any

from anyaccel.recipes.families.flux_2 import autoencoder_flux_2
from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.calls import prompted
from anyaccel.recipes.parts.language_models import qwen_3_vl_model
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH
from anyaccel.recipes.parts.tokenizers import qwen_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 16
# The pipeline reads 13 layers of the language model, the last of which is the 36th.
LANGUAGE_LAYERS = 36
LAYERS_READ = 13


def transformer() -> Any:
    """Return a tiny Ideogram 4 transformer."""
    return diffusers.Ideogram4Transformer2DModel(
        in_channels=16,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        intermediate_size=37,
        adaln_dim=16,
        llm_features_dim=LAYERS_READ * TEXT_WIDTH,
        mrope_section=(4, 2, 2),
    )


def parts() -> dict[str, Any]:
    """Return the components of a tiny Ideogram 4 pipeline, which has a second transformer for guidance."""
    return {
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(),
        "vae": autoencoder_flux_2(),
        "text_encoder": qwen_3_vl_model(num_hidden_layers=LANGUAGE_LAYERS),
        "tokenizer": qwen_tokenizer(),
        "transformer": transformer(),
        "unconditional_transformer": transformer(),
    }


RECIPES = (
    make_recipe(
        name="ideogram-4",
        pipeline="Ideogram4Pipeline",
        family="ideogram-4",
        parts=parts,
        # One of the guidance scale and the schedule of guidance scales must be None.
        call=lambda: prompted(height=SIZE, width=SIZE, guidance_schedule=None, max_sequence_length=64),
    ),
)
