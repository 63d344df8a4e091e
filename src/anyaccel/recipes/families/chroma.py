"""Recipes for tiny Chroma pipelines: text-to-image, image-to-image and inpainting."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.autoencoders import autoencoder_kl
from anyaccel.recipes.parts.calls import make_image, mask, prompted
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH, t5_encoder
from anyaccel.recipes.parts.tokenizers import t5_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 16

recipe = functools.partial(make_recipe, family="chroma")


def transformer() -> Any:
    """Return a tiny Chroma transformer."""
    model = diffusers.ChromaTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=TEXT_WIDTH,
        axes_dims_rope=(4, 4, 8),
        approximator_num_channels=8,
        approximator_hidden_dim=32,
        approximator_layers=1,
    )
    # The inpainting pipeline reads this FLUX attribute; the Chroma transformer has no such argument.
    model.register_to_config(guidance_embeds=False)
    return model


def parts() -> dict[str, Any]:
    """Return the components of a tiny Chroma pipeline.

    Chroma is a FLUX variant with T5 as its only text encoder. A small network computes the modulation
    parameters.
    """
    return {
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(),
        "vae": autoencoder_kl(
            scaling_factor=0.3611, shift_factor=0.1159, use_quant_conv=False, use_post_quant_conv=False
        ),
        "text_encoder": t5_encoder(),
        "tokenizer": t5_tokenizer(),
        "transformer": transformer(),
    }


def call(**more: Any) -> dict[str, Any]:
    """Return call arguments for a 16x16 image, with a negative prompt and at most 32 prompt tokens."""
    return prompted(negative_prompt="blue", height=SIZE, width=SIZE, max_sequence_length=32) | more


RECIPES = (
    recipe(name="chroma", pipeline="ChromaPipeline", parts=parts, call=call),
    recipe(
        name="chroma-image-to-image",
        pipeline="ChromaImg2ImgPipeline",
        parts=parts,
        call=lambda: call(image=make_image(SIZE), strength=0.5, num_inference_steps=4),
    ),
    recipe(
        name="chroma-inpaint",
        pipeline="ChromaInpaintPipeline",
        parts=parts,
        call=lambda: call(image=make_image(SIZE), mask_image=mask(SIZE), strength=0.5, num_inference_steps=4),
    ),
)
