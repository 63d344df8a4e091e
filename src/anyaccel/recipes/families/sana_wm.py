"""Recipes for tiny SANA-WM pipelines: a video from an image and a camera path, and the refiner."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.families import ltx_2
from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.calls import embedding, generator, make_image, prompted
from anyaccel.recipes.parts.language_models import gemma_2, gemma_3
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH
from anyaccel.recipes.parts.tokenizers import gemma_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 32

recipe = functools.partial(make_recipe, family="sana")


def parts() -> dict[str, Any]:
    """Return the components of a tiny SANA-WM pipeline, which uses the autoencoder of LTX-2.

    Its transformer has one layer with linear attention and one with softmax attention.
    """
    return {
        "tokenizer": gemma_tokenizer(),
        "text_encoder": gemma_2(),
        "vae": ltx_2.autoencoder_of_video(),
        "transformer": diffusers.SanaWMTransformer3DModel(
            in_channels=ltx_2.CHANNELS,
            num_layers=2,
            hidden_size=32,
            num_attention_heads=2,
            linear_head_dim=16,
            softmax_every_n=2,
            # Six Plücker coordinates for each of the two frames per latent frame.
            chunk_plucker_channels=12,
            chunk_plucker_post_attn_blocks=2,
            caption_channels=TEXT_WIDTH,
        ),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    }


def parts_of_refiner() -> dict[str, Any]:
    """Return the components of a tiny SANA-WM refiner, which uses parts of LTX-2."""
    return {
        "transformer": diffusers.SanaWMLTX2RefinerTransformer3DModel(**ltx_2.transformer_shape()),
        "connectors": ltx_2.connectors(),
        "tokenizer": gemma_tokenizer(),
        "text_encoder": gemma_3(),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(),
        "vae": ltx_2.autoencoder_of_video(),
        "text_max_sequence_length": 16,
    }


RECIPES = (
    recipe(
        name="sana-wm",
        pipeline="SanaWMPipeline",
        parts=parts,
        call=lambda: prompted(
            image=make_image(SIZE),
            action="w-4",  # four steps forward
            intrinsics=[24.0, 24.0, 16.0, 16.0],
            height=SIZE,
            width=SIZE,
            num_frames=5,
            max_sequence_length=32,
            chi_prompt=["Describe:"],
        ),
    ),
    recipe(
        name="sana-wm-refiner",
        pipeline="SanaWMLTX2Refiner",
        parts=parts_of_refiner,
        # Blocks of two frames, of which only the last three are kept as context.
        call=lambda: {
            "sana_latent": embedding(1, ltx_2.CHANNELS, 7, 8, 8),
            "prompt": "a red fox",
            "fps": 16.0,
            "block_size": 2,
            "kv_max_frames": 4,
            "generator": generator(),
        },
    ),
)
