"""Recipe for a tiny ACE-Step pipeline, which generates music from a prompt and lyrics."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.calls import embedding, prompted
from anyaccel.recipes.parts.language_models import qwen_3_model
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH
from anyaccel.recipes.parts.tokenizers import qwen_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

CHANNELS = 8

recipe = functools.partial(make_recipe, family="audio")


def layers() -> dict[str, Any]:
    """Return the constructor arguments shared by the transformer and the condition encoder."""
    return {
        "hidden_size": 32,
        "intermediate_size": 37,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        # Shorter than the audio, so that the sliding windows matter.
        "sliding_window": 4,
    }


def parts() -> dict[str, Any]:
    """Return the components of a tiny ACE-Step pipeline, with a sampling rate of 16 Hz."""
    home = importlib.import_module("diffusers.pipelines.ace_step")
    return {
        "vae": diffusers.AutoencoderOobleck(
            encoder_hidden_size=6,
            downsampling_ratios=[1, 2],
            channel_multiples=[2, 4],
            decoder_channels=3,
            decoder_input_channels=CHANNELS,
            audio_channels=2,
            sampling_rate=16,
        ),
        "text_encoder": qwen_3_model(),
        "tokenizer": qwen_tokenizer(),
        "transformer": diffusers.AceStepTransformer1DModel(
            # The noisy latents, the source latents and the mask.
            in_channels=3 * CHANNELS,
            audio_acoustic_hidden_dim=CHANNELS,
            num_hidden_layers=2,
            **layers(),
        ),
        "condition_encoder": home.AceStepConditionEncoder(
            text_hidden_dim=TEXT_WIDTH,
            timbre_hidden_dim=CHANNELS,
            num_lyric_encoder_hidden_layers=2,
            num_timbre_encoder_hidden_layers=2,
            **layers(),
        ),
        # The pipeline computes the sigmas itself and passes timesteps between 0 and 1.
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(num_train_timesteps=1, shift=1.0),
    }


def fill_silence(pipe: Any) -> None:
    """Replace the zeros of the latents for silence, as a converted checkpoint does."""
    silence = pipe.condition_encoder.silence_latent
    silence.copy_(embedding(*silence.shape))


RECIPES = (
    recipe(
        name="ace-step",
        pipeline="AceStepPipeline",
        parts=parts,
        finish=fill_silence,
        call=lambda: prompted(lyrics="la la", audio_duration=2.0),
    ),
)
