"""Recipe for a tiny Ovis-Image pipeline."""

from __future__ import annotations

from typing import Any

from anyaccel.recipes.families.flux import flow_scheduler
from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.autoencoders import autoencoder_kl
from anyaccel.recipes.parts.calls import prompted
from anyaccel.recipes.parts.language_models import qwen_3_model
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH
from anyaccel.recipes.parts.tokenizers import qwen_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 16


def parts() -> dict[str, Any]:
    """Return the components of a tiny Ovis-Image pipeline."""
    return {
        "scheduler": flow_scheduler(),
        "vae": autoencoder_kl(
            scaling_factor=0.3611, shift_factor=0.1159, use_quant_conv=False, use_post_quant_conv=False
        ),
        "text_encoder": qwen_3_model(),
        "tokenizer": qwen_tokenizer(),
        "transformer": diffusers.OvisImageTransformer2DModel(
            in_channels=16,
            out_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=TEXT_WIDTH,
            axes_dims_rope=(4, 6, 6),
        ),
    }


RECIPES = (
    make_recipe(
        name="ovis-image",
        pipeline="OvisImagePipeline",
        family="ovis-image",
        parts=parts,
        # The system message takes 130 tokens before the prompt.
        call=lambda: prompted(height=SIZE, width=SIZE, max_sequence_length=256),
    ),
)
