"""Recipes for tiny MiniMax-H3 pipelines, which are modular and generate a video with audio."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.calls import make_image, unprompted
from anyaccel.recipes.parts.language_models import qwen_3_vl
from anyaccel.recipes.parts.processors import qwen_3_vl_processor
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH
from anyaccel.recipes.parts.tokenizers import qwen_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 16
# The shortest video that the pipeline generates, in frames.
FRAMES = 124
CHANNELS = 4
SOUND_CHANNELS = 8


def parts() -> dict[str, Any]:
    """Return the components of a tiny MiniMax-H3 pipeline, which reads the 50th layer of Qwen3-VL."""
    return {
        "text_encoder": qwen_3_vl(num_hidden_layers=51),
        "tokenizer": qwen_tokenizer(),
        "processor": qwen_3_vl_processor(),
        "vae": autoencoder_of_video(),
        "audio_vae": autoencoder_of_sound(),
        "scheduler": diffusers.MiniMaxH3Scheduler(),
        "audio_scheduler": diffusers.MiniMaxH3Scheduler(shift=3.0),
        "transformer": diffusers.MiniMaxH3Transformer3DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            hidden_size=32,
            num_layers=2,
            num_refiner_layers=1,
            ffn_dim=64,
            in_channels=CHANNELS,
            audio_in_channels=SOUND_CHANNELS,
            text_dim=TEXT_WIDTH,
            freq_dim=32,
            time_embed_hidden_dim=32,
            time_embed_dim=16,
            rope_freq_dim=2,
        ),
    }


def autoencoder_of_video() -> Any:
    """Return a tiny MiniMax-H3 video autoencoder with 4x compression, whose decoder is a transformer."""
    return diffusers.AutoencoderKLMiniMaxH3(
        latent_channels=CHANNELS,
        block_out_channels=(8, 8),
        layers_per_block=1,
        spatial_downsample_factors=(2, 2),
        temporal_downsample_factors=(2, 2),
        norm_num_groups=4,
        decoder_num_layers=1,
        decoder_num_attention_heads=2,
        decoder_attention_head_dim=16,
        latents_mean=(0.0,) * CHANNELS,
        latents_std=(1.0,) * CHANNELS,
    )


def autoencoder_of_sound() -> Any:
    """Return a tiny MiniMax-H3 audio autoencoder with four samples per latent."""
    return diffusers.AutoencoderKLMiniMaxH3Audio(
        encoder_dim=8,
        encoder_rates=(2, 2),
        latent_dim=16,
        latent_channels=SOUND_CHANNELS,
        num_attention_heads=2,
        decoder_dim=16,
        decoder_rates=(2, 2),
        decoder_kernel_sizes=(4, 4),
        resblock_kernel_sizes=(3,),
        resblock_dilation_sizes=((1, 3, 5),),
        sampling_rate=160,
        latents_mean=[0.0] * SOUND_CHANNELS,
        latents_std=[1.0] * SOUND_CHANNELS,
    )


def call(**more: Any) -> dict[str, Any]:
    """Return call arguments for the shortest video, at 16x16 pixels."""
    return unprompted(output="videos", prompt="a red fox", height=SIZE, width=SIZE, num_frames=FRAMES) | more


recipe = functools.partial(make_recipe, pipeline="MiniMaxH3ModularPipeline", family="minimax-h3", parts=parts)

RECIPES = (
    recipe(name="minimax-h3", call=call),
    recipe(name="minimax-h3-image-to-video", call=lambda: call(image=make_image(SIZE))),
)
