"""Recipes for tiny audio pipelines: Stable Audio and LongCat-AudioDiT."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.calls import prompted
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH, t5_encoder, umt5_encoder
from anyaccel.recipes.parts.tokenizers import t5_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

recipe = functools.partial(make_recipe, family="audio")


def stable_audio() -> dict[str, Any]:
    """Return the components of a tiny Stable Audio Open pipeline, with a sampling rate of 8 Hz."""
    home = importlib.import_module("diffusers.pipelines.stable_audio.modeling_stable_audio")
    return {
        "vae": diffusers.AutoencoderOobleck(
            encoder_hidden_size=6,
            downsampling_ratios=[1, 2],
            channel_multiples=[2, 4],
            decoder_channels=3,
            decoder_input_channels=4,
            audio_channels=2,
            sampling_rate=8,
        ),
        "text_encoder": t5_encoder(),
        "projection_model": home.StableAudioProjectionModel(
            text_encoder_dim=TEXT_WIDTH, conditioning_dim=16, min_value=0, max_value=32
        ),
        "tokenizer": t5_tokenizer(max_length=16),
        "transformer": diffusers.StableAudioDiTModel(
            sample_size=32,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            num_key_value_attention_heads=2,
            cross_attention_dim=16,
            cross_attention_input_dim=16,
            global_states_input_dim=32,
            time_proj_dim=8,
        ),
        "scheduler": diffusers.EDMDPMSolverMultistepScheduler(sigma_min=0.3, sigma_max=500.0, solver_order=2),
    }


def longcat_audio() -> dict[str, Any]:
    """Return the components of a tiny LongCat-AudioDiT pipeline."""
    return {
        "vae": diffusers.LongCatAudioDiTVae(
            channels=8,
            c_mults=[1, 2],
            strides=[2],
            latent_dim=4,
            encoder_latent_dim=8,
            downsampling_ratio=2,
            sample_rate=64,
        ),
        "text_encoder": umt5_encoder(),
        "tokenizer": t5_tokenizer(max_length=16),
        "transformer": diffusers.LongCatAudioDiTTransformer(
            dit_dim=32, dit_depth=2, dit_heads=4, dit_text_dim=TEXT_WIDTH, latent_dim=4
        ),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
    }


RECIPES = (
    recipe(
        name="longcat-audio",
        pipeline="LongCatAudioDiTPipeline",
        parts=longcat_audio,
        call=lambda: prompted(audio_duration_s=1.0),
    ),
    recipe(
        name="stable-audio",
        pipeline="StableAudioPipeline",
        parts=stable_audio,
        call=lambda: prompted(audio_end_in_s=4.0),
    ),
)
