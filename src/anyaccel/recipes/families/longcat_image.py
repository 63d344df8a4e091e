"""Recipe for a tiny LongCat-Image pipeline."""

from __future__ import annotations

from typing import Any

from anyaccel.recipes.families.flux import flow_scheduler
from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.autoencoders import autoencoder_kl
from anyaccel.recipes.parts.calls import prompted
from anyaccel.recipes.parts.language_models import qwen_2_5_vl
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH
from anyaccel.recipes.parts.tokenizers import qwen_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 16


def parts() -> dict[str, Any]:
    """Return the components of a tiny LongCat-Image pipeline.

    The text processor is omitted, because the pipeline uses it only to rewrite prompts.
    """
    return {
        "scheduler": flow_scheduler(),
        "vae": autoencoder_kl(latent_channels=16, shift_factor=0.1159),
        "text_encoder": qwen_2_5_vl(),
        "tokenizer": qwen_tokenizer(),
        "text_processor": None,
        "transformer": diffusers.LongCatImageTransformer2DModel(
            in_channels=64,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=TEXT_WIDTH,
            pooled_projection_dim=TEXT_WIDTH,
            axes_dims_rope=[4, 6, 6],
        ),
    }


RECIPES = (
    make_recipe(
        name="longcat-image",
        pipeline="LongCatImagePipeline",
        family="longcat-image",
        parts=parts,
        call=lambda: prompted(height=SIZE, width=SIZE, enable_prompt_rewrite=False),
    ),
)
