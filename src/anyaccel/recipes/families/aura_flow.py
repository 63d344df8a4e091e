"""Recipe for a tiny AuraFlow pipeline."""

from __future__ import annotations

from typing import Any

from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.autoencoders import autoencoder_kl
from anyaccel.recipes.parts.calls import prompted
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH, umt5_encoder
from anyaccel.recipes.parts.tokenizers import t5_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 16


def parts() -> dict[str, Any]:
    """Return the components of a tiny AuraFlow pipeline."""
    return {
        "tokenizer": t5_tokenizer(),
        "text_encoder": umt5_encoder(),
        "vae": autoencoder_kl(),
        "transformer": diffusers.AuraFlowTransformer2DModel(
            sample_size=SIZE // 2,
            num_mmdit_layers=1,
            num_single_dit_layers=1,
            attention_head_dim=8,
            num_attention_heads=4,
            joint_attention_dim=TEXT_WIDTH,
            caption_projection_dim=32,
            pos_embed_max_size=16,
        ),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=1.73),
    }


RECIPES = (
    make_recipe(
        name="aura-flow",
        pipeline="AuraFlowPipeline",
        family="aura-flow",
        parts=parts,
        call=lambda: prompted(height=SIZE, width=SIZE, max_sequence_length=32),
    ),
)
