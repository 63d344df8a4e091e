"""Recipes for tiny CogVideoX pipelines.

They cover text-to-video, image-to-video, video-to-video and control videos.
"""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.calls import make_image, make_video, prompted
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH, t5_encoder
from anyaccel.recipes.parts.tokenizers import t5_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 16
FRAMES = 9
CHANNELS = 4
LETTERS = 16

recipe = functools.partial(make_recipe, family="cogvideo")


def autoencoder_cogvideo() -> Any:
    """Return a tiny CogVideoX autoencoder with 8x spatial and 4x temporal compression.

    The pipelines require these compression factors.
    """
    return diffusers.AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        latent_channels=CHANNELS,
        layers_per_block=1,
        norm_num_groups=2,
        temporal_compression_ratio=4,
    )


def transformer(*, in_channels: int = CHANNELS, rotary: bool = False) -> Any:
    """Return a tiny CogVideoX transformer; `rotary` enables rotary embeddings, as in the larger model."""
    return diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=in_channels,
        out_channels=CHANNELS,
        time_embed_dim=8,
        text_embed_dim=TEXT_WIDTH,
        num_layers=2,
        sample_width=SIZE // 8,
        sample_height=SIZE // 8,
        sample_frames=FRAMES,
        max_text_seq_length=LETTERS,
        use_rotary_positional_embeddings=rotary,
    )


def parts(**more: Any) -> dict[str, Any]:
    """Return the components of a tiny CogVideoX pipeline."""
    return {
        "tokenizer": t5_tokenizer(),
        "text_encoder": t5_encoder(),
        "vae": autoencoder_cogvideo(),
        "transformer": transformer(),
        "scheduler": diffusers.CogVideoXDPMScheduler(
            prediction_type="v_prediction", rescale_betas_zero_snr=True, timestep_spacing="trailing"
        ),
    } | more


def parts_with_control() -> dict[str, Any]:
    """Return the components of a tiny CogVideoX Fun Control pipeline, with a DDIM scheduler."""
    return parts(
        transformer=transformer(in_channels=2 * CHANNELS, rotary=True),
        scheduler=diffusers.CogVideoXDDIMScheduler(prediction_type="v_prediction", timestep_spacing="trailing"),
    )


def call(**more: Any) -> dict[str, Any]:
    """Return call arguments for a nine-frame video."""
    return prompted(height=SIZE, width=SIZE, num_frames=FRAMES, max_sequence_length=LETTERS) | more


def call_on_clip(**more: Any) -> dict[str, Any]:
    """Return call arguments without a frame count, for pipelines that read it from an input video."""
    arguments = call(**more)
    del arguments["num_frames"]
    return arguments


RECIPES = (
    recipe(name="cogvideo", pipeline="CogVideoXPipeline", parts=parts, call=call),
    recipe(
        name="cogvideo-rotary",
        pipeline="CogVideoXPipeline",
        parts=lambda: parts(transformer=transformer(rotary=True)),
        call=call,
    ),
    recipe(
        name="cogvideo-image-to-video",
        pipeline="CogVideoXImageToVideoPipeline",
        parts=lambda: parts(transformer=transformer(in_channels=2 * CHANNELS, rotary=True)),
        call=lambda: call(image=make_image(SIZE)),
    ),
    recipe(
        name="cogvideo-video-to-video",
        pipeline="CogVideoXVideoToVideoPipeline",
        parts=parts,
        call=lambda: call_on_clip(video=make_video(FRAMES, SIZE), strength=0.5, num_inference_steps=4),
    ),
    recipe(
        name="cogvideo-control",
        pipeline="CogVideoXFunControlPipeline",
        parts=parts_with_control,
        call=lambda: call_on_clip(control_video=make_video(FRAMES, SIZE)),
    ),
)
