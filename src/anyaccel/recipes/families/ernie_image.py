"""Recipe for a tiny ERNIE-Image pipeline."""

from __future__ import annotations

from typing import Any

from anyaccel.recipes.families.flux_2 import autoencoder_flux_2
from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.calls import prompted
from anyaccel.recipes.parts.language_models import mistral_3_model
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH
from anyaccel.recipes.parts.tokenizers import qwen_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 16


def parts() -> dict[str, Any]:
    """Return the components of a tiny ERNIE-Image pipeline, without the prompt enhancer."""
    return {
        "transformer": diffusers.ErnieImageTransformer2DModel(
            hidden_size=32,
            num_attention_heads=2,
            num_layers=2,
            ffn_hidden_size=64,
            in_channels=16,
            out_channels=16,
            text_in_dim=TEXT_WIDTH,
            rope_axes_dim=(4, 6, 6),
        ),
        "vae": autoencoder_flux_2(),
        "text_encoder": mistral_3_model(),
        "tokenizer": qwen_tokenizer(),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    }


RECIPES = (
    make_recipe(
        name="ernie-image",
        pipeline="ErnieImagePipeline",
        family="ernie-image",
        parts=parts,
        call=lambda: prompted(height=SIZE, width=SIZE, use_pe=False),
    ),
)
