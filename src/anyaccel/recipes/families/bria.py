"""Recipes for tiny Bria, Bria FIBO and Bria FIBO 2 pipelines."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.families.flux import flow_scheduler
from anyaccel.recipes.families.flux_2 import autoencoder_flux_2
from anyaccel.recipes.families.wan import CHANNELS, autoencoder_wan
from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.autoencoders import autoencoder_kl
from anyaccel.recipes.parts.calls import make_image, mask, prompted
from anyaccel.recipes.parts.language_models import qwen_3_vl, smol_lm
from anyaccel.recipes.parts.processors import qwen_3_vl_processor
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH, t5_encoder
from anyaccel.recipes.parts.tokenizers import qwen_tokenizer, t5_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 16
# Hidden states of the language model to read; the real FIBO 2 reads layers between 5 and 35.
LAYERS = (0, 1, 2)

recipe = functools.partial(make_recipe, family="bria")


def parts() -> dict[str, Any]:
    """Return the components of a tiny Bria pipeline, a FLUX variant with T5 as its only text encoder."""
    return {
        "transformer": diffusers.BriaTransformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=TEXT_WIDTH,
            axes_dims_rope=[4, 4, 8],
        ),
        "scheduler": flow_scheduler(),
        "vae": autoencoder_kl(shift_factor=0.0),
        "text_encoder": t5_encoder(),
        "tokenizer": t5_tokenizer(),
    }


def parts_of_fibo() -> dict[str, Any]:
    """Return the components of a tiny Bria FIBO pipeline.

    Each transformer block receives the hidden states of a different language model layer.
    """
    return {
        "transformer": diffusers.BriaFiboTransformer2DModel(
            in_channels=CHANNELS,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=2 * TEXT_WIDTH,
            axes_dims_rope=[4, 4, 8],
            text_encoder_dim=TEXT_WIDTH,
        ),
        "scheduler": flow_scheduler(),
        "vae": autoencoder_wan(),
        "text_encoder": smol_lm(),
        "tokenizer": qwen_tokenizer(),
    }


def parts_of_fibo_2() -> dict[str, Any]:
    """Return the components of a tiny Bria FIBO 2 pipeline, which compresses the prompt to a few gist tokens."""
    return {
        "transformer": diffusers.BriaFibo2Transformer2DModel(
            in_channels=4,
            dim=32,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=2,
            cap_feat_dim=len(LAYERS) * TEXT_WIDTH,
            injection_layer_ids=(1,),
            perceiver_num_layers=1,
            min_num_gist_tokens=4,
            max_num_gist_tokens=8,
            gist_step=2,
            gist_min_text_len=16,
            gist_max_text_len=256,
            axes_dims=(4, 6, 6),
            axes_lens=(64, 32, 32),
        ),
        "scheduler": flow_scheduler(),
        "vae": autoencoder_flux_2(),
        "text_encoder": qwen_3_vl(),
        "processor": qwen_3_vl_processor(),
    }


def read_first_layers(pipe: Any) -> None:
    """Read hidden states that the tiny text encoder has, for the perceiver and for one injection layer."""
    pipe.text_encoder_out_layers = (LAYERS, LAYERS)


RECIPES = (
    recipe(
        name="bria-fibo",
        pipeline="BriaFiboPipeline",
        parts=parts_of_fibo,
        # The pipeline assumes an autoencoder with 16x compression.
        call=lambda: prompted(negative_prompt="blue", height=128, width=128, max_sequence_length=64),
    ),
    recipe(
        name="bria-fibo-edit",
        pipeline="BriaFiboEditPipeline",
        parts=parts_of_fibo,
        call=lambda: prompted(
            prompt='{"edit_instruction": "a red fox"}',
            image=make_image(128),
            mask=mask(128),
            negative_prompt="blue",
            height=128,
            width=128,
            max_sequence_length=64,
        ),
    ),
    recipe(
        name="bria-fibo-2",
        pipeline="BriaFibo2Pipeline",
        parts=parts_of_fibo_2,
        finish=read_first_layers,
        call=lambda: prompted(image=make_image(SIZE), negative_prompt="blue", height=SIZE, width=SIZE),
    ),
    recipe(
        name="bria",
        pipeline="BriaPipeline",
        parts=parts,
        call=lambda: prompted(height=SIZE, width=SIZE, max_sequence_length=32),
    ),
)
