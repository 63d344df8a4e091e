"""Recipes for tiny LTX-2 pipelines: text-to-video and image-to-video, both with audio."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from anyaccel.recipes.families.flux import flow_scheduler
from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.calls import make_image, prompted
from anyaccel.recipes.parts.language_models import gemma_3
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH
from anyaccel.recipes.parts.tokenizers import gemma_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = [
    "CHANNELS",
    "FRAMES",
    "MEL_BINS",
    "RECIPES",
    "SIZE",
    "SOUND_CHANNELS",
    "autoencoder_of_video",
    "call",
    "connectors",
    "parts",
    "transformer",
    "transformer_shape",
]

SIZE = 32
FRAMES = 5
CHANNELS = 4
SOUND_CHANNELS = 2
MEL_BINS = 8

recipe = functools.partial(make_recipe, family="ltx")


def autoencoder_of_video() -> Any:
    """Return a tiny LTX-2 video autoencoder with 2x2 patches and one downsampling level."""
    return diffusers.AutoencoderKLLTX2Video(
        latent_channels=CHANNELS,
        block_out_channels=(8,),
        decoder_block_out_channels=(8,),
        down_block_types=("LTX2VideoDownBlock3D",),
        layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        spatio_temporal_scaling=(True,),
        decoder_spatio_temporal_scaling=(True,),
        decoder_inject_noise=(False, False),
        downsample_type=("spatiotemporal",),
        upsample_type=("spatiotemporal",),
        upsample_residual=(False,),
        upsample_factor=(1,),
        patch_size=2,
        spatial_compression_ratio=4,
        temporal_compression_ratio=2,
    )


def autoencoder_of_sound() -> Any:
    """Return a tiny LTX-2 audio autoencoder, which encodes spectrograms."""
    return diffusers.AutoencoderKLLTX2Audio(
        base_channels=4,
        ch_mult=(1, 1, 1),
        num_res_blocks=1,
        resolution=32,
        latent_channels=SOUND_CHANNELS,
        mel_bins=MEL_BINS,
    )


def connectors() -> Any:
    """Return tiny LTX-2 connectors, which map hidden states of Gemma 3 to video and audio conditioning."""
    home = importlib.import_module("diffusers.pipelines.ltx2.connectors")
    return home.LTX2TextConnectors(
        caption_channels=TEXT_WIDTH,
        text_proj_in_factor=3,
        video_connector_num_attention_heads=4,
        video_connector_attention_head_dim=8,
        video_connector_num_layers=1,
        video_connector_num_learnable_registers=None,
        audio_connector_num_attention_heads=4,
        audio_connector_attention_head_dim=8,
        audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=None,
        connector_rope_base_seq_len=32,
    )


def transformer_shape(**more: Any) -> dict[str, Any]:
    """Return constructor arguments for a tiny transformer, which has different widths for video and audio."""
    return {
        "in_channels": CHANNELS,
        "out_channels": CHANNELS,
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "cross_attention_dim": 16,
        "vae_scale_factors": (2, 4, 4),
        "base_height": SIZE,
        "base_width": SIZE,
        "audio_in_channels": SOUND_CHANNELS * MEL_BINS // 4,
        "audio_out_channels": SOUND_CHANNELS * MEL_BINS // 4,
        "audio_num_attention_heads": 2,
        "audio_attention_head_dim": 4,
        "audio_cross_attention_dim": 8,
        "num_layers": 2,
        "caption_channels": TEXT_WIDTH,
    } | more


def transformer(**more: Any) -> Any:
    """Return a tiny LTX-2 transformer."""
    return diffusers.LTX2VideoTransformer3DModel(**transformer_shape(**more))


def vocoder() -> Any:
    """Return a tiny LTX-2 vocoder, which converts a spectrogram to audio."""
    home = importlib.import_module("diffusers.pipelines.ltx2.vocoder")
    return home.LTX2Vocoder(
        in_channels=2 * MEL_BINS,
        hidden_channels=8,
        upsample_kernel_sizes=[4, 4],
        upsample_factors=[2, 2],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1, 3, 5]],
        output_sampling_rate=16000,
    )


def parts() -> dict[str, Any]:
    """Return the components of a tiny LTX-2 pipeline."""
    return {
        "scheduler": flow_scheduler(),
        "vae": autoencoder_of_video(),
        "audio_vae": autoencoder_of_sound(),
        "text_encoder": gemma_3(),
        "tokenizer": gemma_tokenizer(),
        "connectors": connectors(),
        "transformer": transformer(),
        "vocoder": vocoder(),
    }


def call(**more: Any) -> dict[str, Any]:
    """Return call arguments for a five-frame video."""
    return (
        prompted(
            height=SIZE,
            width=SIZE,
            num_frames=FRAMES,
            max_sequence_length=16,
            spatio_temporal_guidance_blocks=[1],
        )
        | more
    )


RECIPES = (
    recipe(name="ltx-2", pipeline="LTX2Pipeline", parts=parts, call=call),
    recipe(
        name="ltx-2-image-to-video",
        pipeline="LTX2ImageToVideoPipeline",
        parts=parts,
        call=lambda: call(image=make_image(SIZE), image_crf=0),  # crf 0 skips the compression by a video codec
    ),
)
