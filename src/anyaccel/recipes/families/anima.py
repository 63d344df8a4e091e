"""Recipes for tiny Anima pipelines, which are modular: text-to-image and image-to-image."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.families.qwen_image import CHANNELS, autoencoder_qwen
from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.calls import make_image, unprompted
from anyaccel.recipes.parts.language_models import qwen_3_model
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH
from anyaccel.recipes.parts.tokenizers import T5_VOCABULARY, qwen_tokenizer, t5_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 16
LETTERS = 32


def parts() -> dict[str, Any]:
    """Return the components of a tiny Anima pipeline.

    The text conditioner combines the hidden states of Qwen3 with the token IDs of T5.
    """
    return {
        "text_encoder": qwen_3_model(),
        "tokenizer": qwen_tokenizer(),
        "t5_tokenizer": t5_tokenizer(),
        "text_conditioner": diffusers.AnimaTextConditioner(
            source_dim=TEXT_WIDTH,
            target_dim=TEXT_WIDTH,
            model_dim=32,
            num_layers=2,
            num_attention_heads=2,
            target_vocab_size=len(T5_VOCABULARY),
            min_sequence_length=LETTERS,
        ),
        "transformer": diffusers.CosmosTransformer3DModel(
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=2,
            mlp_ratio=2,
            text_embed_dim=TEXT_WIDTH,
            adaln_lora_dim=4,
            max_size=(4, 32, 32),
            # diffusers resizes the mask with torchvision, which is not a dependency of anyaccel.
            concat_padding_mask=False,
            extra_pos_embed_type=None,
        ),
        "vae": autoencoder_qwen(),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    }


def call(**more: Any) -> dict[str, Any]:
    """Return call arguments for a 16x16 image, with at most 32 prompt tokens."""
    return (
        unprompted(
            output="images",
            prompt="a red fox",
            negative_prompt="blue",
            height=SIZE,
            width=SIZE,
            max_sequence_length=LETTERS,
        )
        | more
    )


recipe = functools.partial(make_recipe, pipeline="AnimaModularPipeline", family="anima", parts=parts)

RECIPES = (
    recipe(name="anima", call=call),
    recipe(
        name="anima-image-to-image",
        call=lambda: call(image=make_image(SIZE), strength=0.5, num_inference_steps=4),
    ),
)
