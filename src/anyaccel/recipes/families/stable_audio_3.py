"""Recipes for tiny Stable Audio 3 pipelines: text-to-audio, audio-to-audio and inpainting."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.calls import embedding, unprompted
from anyaccel.recipes.parts.language_models import t5_gemma_encoder_model
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH
from anyaccel.recipes.parts.tokenizers import gemma_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

CHANNELS = 8
RATE = 16
SECONDS = 2.0

recipe = functools.partial(make_recipe, family="audio")


def parts() -> dict[str, Any]:
    """Return the components of a tiny Stable Audio 3 pipeline, with a sampling rate of 16 Hz."""
    home = importlib.import_module("diffusers.pipelines.stable_audio_3.modeling_stable_audio_3")
    return {
        "vae": diffusers.AutoencoderSAME(
            audio_channels=2,
            patch_size=2,
            encoder_channels=8,
            encoder_c_mults=(2,),
            encoder_strides=(2,),
            encoder_transformer_depths=(1,),
            latent_dim=CHANNELS,
            dim_heads=4,
            sampling_rate=RATE,
        ),
        "text_encoder": t5_gemma_encoder_model(),
        "tokenizer": gemma_tokenizer(max_length=32),
        "duration_embedder": home.StableAudio3DurationEmbedder(output_dim=TEXT_WIDTH, fourier_dim=16),
        "transformer": diffusers.StableAudio3DiTModel(
            io_channels=CHANNELS,
            embed_dim=32,
            depth=2,
            num_heads=4,
            cond_token_dim=TEXT_WIDTH,
            global_cond_dim=TEXT_WIDTH,
            # Inpainting adds the masked latents and the mask.
            local_add_cond_dim=CHANNELS + 1,
            timestep_features_dim=16,
            ff_mult=2,
            num_memory_tokens=3,
        ),
        # The distilled model adds new noise in every step.
        "scheduler": scheduler(stochastic_sampling=True),
    }


def scheduler(**more: Any) -> Any:
    """Return a scheduler with timesteps from 0 to 1, which the transformer multiplies by up to 62,832.

    The float32 products of larger timesteps have no exact sine: on CUDA, it differs by up to 2 from the CPU's.
    """
    return diffusers.FlowMatchEulerDiscreteScheduler(num_train_timesteps=1, **more)


def call(**more: Any) -> dict[str, Any]:
    """Return call arguments without guidance, which the distilled model does not use."""
    return unprompted(prompt="a red fox", duration=SECONDS) | more


def audio() -> Any:
    """Return a stereo waveform of random samples."""
    return 0.5 * embedding(1, 2, int(SECONDS * RATE))


RECIPES = (
    recipe(
        name="stable-audio-3",
        pipeline="StableAudio3Pipeline",
        # The base model has deterministic steps and uses guidance.
        parts=lambda: parts() | {"scheduler": scheduler()},
        call=lambda: call(guidance_scale=5.0, negative_prompt="blue"),
    ),
    recipe(
        name="stable-audio-3-audio-to-audio",
        pipeline="StableAudio3AudioToAudioPipeline",
        parts=parts,
        call=lambda: call(audio=audio(), init_noise_level=0.8),
    ),
    recipe(
        name="stable-audio-3-inpaint",
        pipeline="StableAudio3InpaintPipeline",
        parts=parts,
        call=lambda: call(audio=audio(), mask_start_seconds=0.5, mask_end_seconds=1.5),
    ),
)
