"""Recipes for tiny Kandinsky 6 pipelines: video with audio from text or an image, and super-resolution."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.families import kandinsky_5
from anyaccel.recipes.families.hunyuan_video import autoencoder_hunyuan
from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.calls import embedding, make_image, prompted, unprompted
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 16
FRAMES = 5
CHANNELS = 4
MEL_BINS = 8

recipe = functools.partial(make_recipe, family="kandinsky-6")


def parts() -> dict[str, Any]:
    """Return the components of a tiny Kandinsky 6 pipeline, with the text encoders of Kandinsky 5."""
    return kandinsky_5.parts(vae=autoencoder_hunyuan(), visual_cond=True) | {
        "transformer": diffusers.Kandinsky6Transformer3DModel(
            in_visual_dim=CHANNELS,
            out_visual_dim=CHANNELS,
            in_text_dim=TEXT_WIDTH,
            in_text_dim2=TEXT_WIDTH,
            time_dim=16,
            model_dim=32,
            ff_dim=64,
            num_text_blocks=1,
            num_visual_blocks=2,
            axes_dims=(4, 6, 6),
            in_audio_dim=CHANNELS,
            out_audio_dim=CHANNELS,
            # Tokens of the given image and generated tokens.
            visual_token_type_num_embeddings=2,
        ),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
        "audio_vae": diffusers.MMAudioVAE(
            mel_bins=MEL_BINS,
            latent_channels=CHANNELS,
            hidden_channels=8,
            channel_multipliers=(1, 2),
            layers_per_block=1,
            sample_rate=64,
            n_fft=16,
            hop_length=4,
        ),
        # The upsampling rates multiply to the hop length.
        "vocoder": diffusers.MMAudioVocoder(
            num_mels=MEL_BINS,
            upsample_initial_channel=8,
            upsample_rates=(2, 2),
            upsample_kernel_sizes=(4, 4),
            resblock_kernel_sizes=(3,),
            resblock_dilation_sizes=((1, 3),),
        ),
    }


def parts_of_super_resolution() -> dict[str, Any]:
    """Return the components of a tiny pipeline that upscales a video in overlapping tiles."""
    return {
        "transformer": diffusers.Kandinsky6SRTransformer3DModel(
            in_visual_dim=CHANNELS,
            out_visual_dim=CHANNELS,
            time_dim=16,
            patch_size=(1, 1, 1),
            model_dim=24,
            ff_dim=32,
            num_visual_blocks=2,
            axes_dims=(4, 4, 4),
            # Multiples of 32, because block-sparse attention requires multiples of 8 latents.
            tile_sizes=((32, 32), (32, 64), (64, 32)),
        ),
        "vae": diffusers.Kandinsky6SRVAE(
            latent_channels=CHANNELS,
            encoder_block_out_channels=(4, 8, 8),
            decoder_block_out_channels=(4, 8, 8),
            layers_per_block=1,
            temporal_compression_ratio=4,
            temporal_compression_start_level=0,
        ),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.5),
        "latent_upscaler": diffusers.Kandinsky6SRLatentUpscalerBank(
            in_channels=CHANNELS,
            stage_channels=(8, 8, 4),
            num_pre_blocks=1,
            num_mid_blocks=1,
            num_post_blocks=1,
            num_x2_adapter_blocks=1,
            scales=(2, 4),
        ),
    }


def call(**more: Any) -> dict[str, Any]:
    """Return call arguments for a five-frame video.

    The tokens suffice for the prompt template, with one token per character.
    """
    return prompted(negative_prompt="blue", height=SIZE, width=SIZE, num_frames=FRAMES, max_sequence_length=640) | more


RECIPES = (
    recipe(name="kandinsky-6", pipeline="Kandinsky6TI2VAPipeline", parts=parts, call=call),
    recipe(
        name="kandinsky-6-image",
        pipeline="Kandinsky6TI2VAPipeline",
        parts=parts,
        call=lambda: call(image=make_image(SIZE)),
    ),
    recipe(
        name="kandinsky-6-super-resolution",
        pipeline="Kandinsky6SRPipeline",
        parts=parts_of_super_resolution,
        call=lambda: unprompted(video=embedding(FRAMES, 3, SIZE, 2 * SIZE).sigmoid(), resolution_scale=2),
    ),
)
