"""Recipes for tiny HunyuanImage 2.1 pipelines: text-to-image and refiner."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.lazy_modules import diffusers, transformers
from anyaccel.recipes.parts.calls import make_image, unprompted
from anyaccel.recipes.parts.language_models import qwen_2_5_vl
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH, t5_encoder
from anyaccel.recipes.parts.tokenizers import qwen_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES", "byt5"]

SIZE = 16

recipe = functools.partial(make_recipe, family="hunyuan-image")


def byt5() -> dict[str, Any]:
    """Return a tiny ByT5 encoder and its tokenizer, for text that is to be rendered in the image."""
    tokenizer = transformers.ByT5Tokenizer()
    return {"text_encoder_2": t5_encoder(vocab_size=len(tokenizer)), "tokenizer_2": tokenizer}


def transformer_shape(**more: Any) -> dict[str, Any]:
    """Return the constructor arguments shared by the transformers of both pipelines."""
    return {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 1,
        "num_single_layers": 1,
        "num_refiner_layers": 1,
        "text_embed_dim": TEXT_WIDTH,
        "rope_axes_dim": (8, 8),
    } | more


def parts() -> dict[str, Any]:
    """Return the components of a tiny HunyuanImage 2.1 pipeline."""
    return byt5() | {
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=4.0),
        "vae": diffusers.AutoencoderKLHunyuanImage(
            in_channels=3,
            out_channels=3,
            latent_channels=4,
            block_out_channels=(32, 32),
            layers_per_block=1,
            spatial_compression_ratio=2,
            sample_size=SIZE,
            scaling_factor=0.75,
        ),
        "text_encoder": qwen_2_5_vl(),
        "tokenizer": qwen_tokenizer(),
        "transformer": diffusers.HunyuanImageTransformer2DModel(**transformer_shape(text_embed_2_dim=TEXT_WIDTH)),
        "guider": diffusers.ClassifierFreeGuidance(guidance_scale=3.5),
        "ocr_guider": diffusers.ClassifierFreeGuidance(guidance_scale=3.5),
    }


def parts_of_refiner() -> dict[str, Any]:
    """Return the components of a tiny HunyuanImage 2.1 refiner, whose guidance is distilled by default."""
    return {
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=4.0),
        "vae": diffusers.AutoencoderKLHunyuanImageRefiner(
            latent_channels=4,
            block_out_channels=(8, 8),
            layers_per_block=1,
            spatial_compression_ratio=2,
            temporal_compression_ratio=1,
        ),
        "text_encoder": qwen_2_5_vl(),
        "tokenizer": qwen_tokenizer(),
        # The latents of two frames are the channels of one, and the image is concatenated to the noise.
        "transformer": diffusers.HunyuanImageTransformer2DModel(
            **transformer_shape(
                in_channels=16, out_channels=8, patch_size=(1, 1, 1), rope_axes_dim=(4, 6, 6), guidance_embeds=True
            )
        ),
        "guider": None,
    }


RECIPES = (
    recipe(
        name="hunyuan-image",
        pipeline="HunyuanImagePipeline",
        parts=parts,
        call=lambda: unprompted(prompt='a fox that says "hi"', negative_prompt="blue", height=SIZE, width=SIZE),
    ),
    recipe(
        name="hunyuan-image-refiner",
        pipeline="HunyuanImageRefinerPipeline",
        parts=parts_of_refiner,
        call=lambda: unprompted(prompt="a red fox", image=make_image(SIZE), height=SIZE, width=SIZE),
    ),
)
