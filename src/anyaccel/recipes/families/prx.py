"""Recipes for tiny PRX pipelines: with an autoencoder and in pixel space."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.lazy_modules import diffusers, torch
from anyaccel.recipes.parts.autoencoders import autoencoder_kl
from anyaccel.recipes.parts.calls import embedding, prompted
from anyaccel.recipes.parts.language_models import qwen_3_vl_text, t5_gemma_encoder
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH
from anyaccel.recipes.parts.tokenizers import gemma_tokenizer, qwen_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 16

recipe = functools.partial(make_recipe, family="prx")


def transformer(**more: Any) -> Any:
    """Return a tiny PRX transformer."""
    return diffusers.PRXTransformer2DModel(
        **{
            "in_channels": 4,
            "patch_size": 2,
            "context_in_dim": TEXT_WIDTH,
            "hidden_size": 32,
            "mlp_ratio": 2.0,
            "num_heads": 2,
            "depth": 2,
            "axes_dim": [8, 8],
        }
        | more
    )


def parts() -> dict[str, Any]:
    """Return the components of a tiny PRX pipeline."""
    return {
        "transformer": transformer(),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        "text_encoder": t5_gemma_encoder(),
        "tokenizer": gemma_tokenizer(max_length=32),
        "vae": autoencoder_kl(shift_factor=0.1),
        "default_sample_size": SIZE,
    }


def parts_in_pixel_space() -> dict[str, Any]:
    """Return the components of a tiny PRX pipeline without an autoencoder."""
    return {
        "transformer": transformer(in_channels=3, patch_size=4, bottleneck_size=8, resolution_embeds=True),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        "text_encoder": qwen_3_vl_text(),
        "tokenizer": qwen_tokenizer(),
        "default_sample_size": SIZE,
        "prompt_max_tokens": 32,
    }


def call() -> dict[str, Any]:
    """Return call arguments with prompt embeddings instead of a prompt.

    The pipeline cleans prompts with ftfy, which is not a dependency of anyaccel.
    """
    return prompted(
        prompt=None,
        prompt_embeds=embedding(1, 16, TEXT_WIDTH),
        negative_prompt_embeds=embedding(1, 16, TEXT_WIDTH, seed=4),
        prompt_attention_mask=torch.ones(1, 16, dtype=torch.bool),
        negative_prompt_attention_mask=torch.ones(1, 16, dtype=torch.bool),
        height=SIZE,
        width=SIZE,
        use_resolution_binning=False,
    )


RECIPES = (
    recipe(
        name="prx",
        pipeline="PRXPipeline",
        parts=parts,
        call=call,
    ),
    recipe(name="prx-pixel", pipeline="PRXPixelPipeline", parts=parts_in_pixel_space, call=call),
)
