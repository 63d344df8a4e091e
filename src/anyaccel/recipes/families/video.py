"""Recipes for tiny Mochi, Allegro, Latte and Stable Video Diffusion pipelines."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.autoencoders import autoencoder_kl
from anyaccel.recipes.parts.calls import make_image, prompted, unprompted
from anyaccel.recipes.parts.image_encoders import IMAGE_WIDTH, clip_image_processor, clip_vision
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH, t5_encoder
from anyaccel.recipes.parts.tokenizers import t5_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 16

recipe = functools.partial(make_recipe, family="video")


def mochi() -> dict[str, Any]:
    """Return the components of a tiny Mochi pipeline."""
    return {
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
        "vae": diffusers.AutoencoderKLMochi(
            latent_channels=12,
            encoder_block_out_channels=(32, 32, 32, 32),
            decoder_block_out_channels=(32, 32, 32, 32),
            layers_per_block=(1, 1, 1, 1, 1),
        ),
        "text_encoder": t5_encoder(),
        "tokenizer": t5_tokenizer(),
        "transformer": diffusers.MochiTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=8,
            num_layers=2,
            pooled_projection_dim=16,
            text_embed_dim=TEXT_WIDTH,
            time_embed_dim=4,
            activation_fn="swiglu",
            max_sequence_length=16,
        ),
    }


def allegro() -> dict[str, Any]:
    """Return the components of a tiny Allegro pipeline."""
    return {
        "tokenizer": t5_tokenizer(),
        "text_encoder": t5_encoder(),
        "vae": diffusers.AutoencoderKLAllegro(
            down_block_types=("AllegroDownBlock3D",) * 4,
            up_block_types=("AllegroUpBlock3D",) * 4,
            block_out_channels=(8, 8, 8, 8),
            layers_per_block=1,
            norm_num_groups=2,
        ),
        "transformer": diffusers.AllegroTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=12,
            num_layers=1,
            cross_attention_dim=24,
            sample_width=SIZE // 8,
            sample_height=SIZE // 8,
            sample_frames=2,
            caption_channels=TEXT_WIDTH,
        ),
        "scheduler": diffusers.EulerAncestralDiscreteScheduler(),
    }


def use_small_tiles(pipe: Any) -> None:
    """Reduce the tile size of the Allegro autoencoder.

    Allegro always decodes in tiles. The default tile has 24 frames and is 320 pixels wide and high.
    """
    pipe.vae.enable_tiling()
    pipe.vae.kernel = (8, SIZE, SIZE)
    pipe.vae.stride = (4, SIZE // 2, SIZE // 2)


def latte() -> dict[str, Any]:
    """Return the components of a tiny Latte pipeline."""
    return {
        "tokenizer": t5_tokenizer(),
        "text_encoder": t5_encoder(),
        "vae": autoencoder_kl(),
        "transformer": diffusers.LatteTransformer3DModel(
            sample_size=SIZE // 2,
            num_layers=1,
            patch_size=2,
            attention_head_dim=8,
            num_attention_heads=3,
            caption_channels=TEXT_WIDTH,
            in_channels=4,
            cross_attention_dim=24,
            out_channels=8,
            attention_bias=True,
            activation_fn="gelu-approximate",
            num_embeds_ada_norm=1000,
            norm_type="ada_norm_single",
            norm_elementwise_affine=False,
            video_length=1,
        ),
        "scheduler": diffusers.DDIMScheduler(),
    }


def stable_video_diffusion() -> dict[str, Any]:
    """Return the components of a tiny Stable Video Diffusion pipeline.

    All layers have at least 32 channels, because all group norms have 32 groups.
    """
    return {
        "vae": diffusers.AutoencoderKLTemporalDecoder(
            block_out_channels=(32, 32), down_block_types=("DownEncoderBlock2D",) * 2
        ),
        "image_encoder": clip_vision(image_size=224, patch_size=32),
        "unet": diffusers.UNetSpatioTemporalConditionModel(
            block_out_channels=(32, 64),
            layers_per_block=1,
            down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
            up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
            cross_attention_dim=IMAGE_WIDTH,
            num_attention_heads=(2, 4),
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=24,
        ),
        "scheduler": diffusers.EulerDiscreteScheduler(
            prediction_type="v_prediction",
            timestep_type="continuous",
            timestep_spacing="leading",
            use_karras_sigmas=True,
            sigma_min=0.002,
            sigma_max=700.0,
            steps_offset=1,
        ),
        "feature_extractor": clip_image_processor(224),
    }


RECIPES = (
    recipe(
        name="mochi",
        pipeline="MochiPipeline",
        parts=mochi,
        call=lambda: prompted(height=SIZE, width=SIZE, num_frames=7, max_sequence_length=16),
    ),
    recipe(
        name="allegro",
        pipeline="AllegroPipeline",
        parts=allegro,
        finish=use_small_tiles,
        call=lambda: prompted(height=SIZE, width=SIZE, num_frames=8, max_sequence_length=16, clean_caption=False),
    ),
    recipe(
        name="latte",
        pipeline="LattePipeline",
        parts=latte,
        call=lambda: prompted(height=SIZE, width=SIZE, video_length=1, clean_caption=False),
    ),
    recipe(
        name="stable-video-diffusion",
        pipeline="StableVideoDiffusionPipeline",
        parts=stable_video_diffusion,
        call=lambda: unprompted(image=make_image(SIZE), height=SIZE, width=SIZE, num_frames=2, decode_chunk_size=2),
    ),
)
