"""Recipes for tiny HunyuanVideo pipelines.

They cover text-to-video, image-to-video, SkyReels V1, FramePack and HunyuanVideo 1.5.
"""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.families.hunyuan_image import byt5
from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.calls import make_image, prompted, unprompted
from anyaccel.recipes.parts.image_encoders import (
    IMAGE_WIDTH,
    clip_image_processor,
    siglip_image_processor,
    siglip_vision,
)
from anyaccel.recipes.parts.language_models import LLAVA_IMAGE_TOKENS, LLAVA_TOKENS, llama, llava, qwen_2_5_vl_text
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH, clip_text
from anyaccel.recipes.parts.tokenizers import clip_tokenizer, llama_tokenizer, qwen_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES", "autoencoder_hunyuan", "transformer_shape"]

SIZE = 16
FRAMES = 5
CHANNELS = 4

recipe = functools.partial(make_recipe, family="hunyuan-video")


def autoencoder_hunyuan() -> Any:
    """Return a tiny HunyuanVideo autoencoder with 8x spatial and 4x temporal compression."""
    return diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=CHANNELS,
        down_block_types=("HunyuanVideoDownBlock3D",) * 4,
        up_block_types=("HunyuanVideoUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
    )


def transformer_shape(**more: Any) -> dict[str, Any]:
    """Return constructor arguments for a tiny transformer with one layer of each type."""
    return {
        "in_channels": CHANNELS,
        "out_channels": CHANNELS,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 1,
        "num_single_layers": 1,
        "num_refiner_layers": 1,
        "patch_size": 1,
        "patch_size_t": 1,
        "text_embed_dim": TEXT_WIDTH,
        "pooled_projection_dim": TEXT_WIDTH,
        "rope_axes_dim": (4, 6, 6),
    } | more


def parts(**more: Any) -> dict[str, Any]:
    """Return the components of a tiny HunyuanVideo pipeline, with Llama and CLIP as text encoders."""
    return {
        "text_encoder": llama(),
        "tokenizer": llama_tokenizer(),
        "transformer": diffusers.HunyuanVideoTransformer3DModel(**transformer_shape()),
        "vae": autoencoder_hunyuan(),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
        "text_encoder_2": clip_text(),
        "tokenizer_2": clip_tokenizer(),
    } | more


def parts_of_image_to_video() -> dict[str, Any]:
    """Return the components of a tiny HunyuanVideo image-to-video pipeline, with LLaVA as first text encoder.

    The transformer receives the video latents concatenated with image latents and a mask.
    """
    shape = transformer_shape(in_channels=2 * CHANNELS + 1, image_condition_type="latent_concat")
    return parts(
        text_encoder=llava(num_hidden_layers=3),
        tokenizer=llama_tokenizer(additional_special_tokens=list(LLAVA_TOKENS)),
        transformer=diffusers.HunyuanVideoTransformer3DModel(**shape),
        image_processor=clip_image_processor(),
    )


def parts_of_skyreels() -> dict[str, Any]:
    """Return the components of a tiny SkyReels V1 pipeline.

    The transformer receives the video latents concatenated with image latents.
    """
    shape = transformer_shape(in_channels=2 * CHANNELS)
    return parts(transformer=diffusers.HunyuanVideoTransformer3DModel(**shape))


def parts_of_framepack() -> dict[str, Any]:
    """Return the components of a tiny FramePack pipeline.

    FramePack compresses the frames that are already generated into a few tokens.
    """
    shape = transformer_shape(patch_size=2, has_image_proj=True, image_proj_dim=IMAGE_WIDTH, has_clean_x_embedder=True)
    return parts(
        transformer=diffusers.HunyuanVideoFramepackTransformer3DModel(**shape),
        image_encoder=siglip_vision(),
        feature_extractor=siglip_image_processor(),
    )


def parts_of_version_1_5(*, task_type: str = "t2v") -> dict[str, Any]:
    """Return the components of a tiny HunyuanVideo 1.5 pipeline; `task_type` is `t2v` or `i2v`.

    The transformer also receives image latents and a mask.
    """
    return byt5() | {
        "text_encoder": qwen_2_5_vl_text(num_hidden_layers=3),
        "tokenizer": qwen_tokenizer(),
        "transformer": diffusers.HunyuanVideo15Transformer3DModel(
            in_channels=2 * CHANNELS + 1,
            out_channels=CHANNELS,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=1,
            num_refiner_layers=1,
            text_embed_dim=TEXT_WIDTH,
            text_embed_2_dim=TEXT_WIDTH,
            image_embed_dim=IMAGE_WIDTH,
            rope_axes_dim=(4, 6, 6),
            # Two tokens per side: for a single one, torch finds no attention kernel on CUDA (torch 2.11).
            target_size=2 * SIZE,
            task_type=task_type,
        ),
        "vae": diffusers.AutoencoderKLHunyuanVideo15(
            latent_channels=CHANNELS,
            block_out_channels=(8, 8, 8, 8, 8),
            layers_per_block=1,
        ),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
        "guider": diffusers.ClassifierFreeGuidance(guidance_scale=6.0),
    }


def call_image_to_video() -> dict[str, Any]:
    """Return call arguments with a short prompt template.

    The first frame latents are those of the image, and the pipeline drops the first four frames of the video.
    """
    start = 3  # <s>, <|end_header_id|> and a space come before the image tokens
    template = {
        "template": "<|end_header_id|> <image>See:<|end_header_id|>{}\nAI<|end_header_id|>\n",
        "crop_start": 9,
        "image_emb_len": LLAVA_IMAGE_TOKENS,
        "image_emb_start": start,
        "image_emb_end": start + LLAVA_IMAGE_TOKENS,
    }
    return call(image=make_image(SIZE), num_frames=9, max_sequence_length=32, prompt_template=template)


def shorten_text(pipe: Any) -> None:
    """Shorten the system message and the prompt limits, as the tiny tokenizers use one token per letter."""
    pipe.system_message = "Describe."
    pipe.prompt_template_encode_start_idx = 20
    pipe.tokenizer_max_length = 80
    pipe.tokenizer_2_max_length = 16


def call(**more: Any) -> dict[str, Any]:
    """Return call arguments for a five-frame video, with a short prompt template."""
    return (
        prompted(
            height=SIZE,
            width=SIZE,
            num_frames=FRAMES,
            max_sequence_length=16,
            prompt_template={"template": "Describe: {}", "crop_start": 10},
        )
        | more
    )


RECIPES = (
    recipe(name="hunyuan-video", pipeline="HunyuanVideoPipeline", parts=parts, call=call),
    recipe(
        name="hunyuan-video-image-to-video",
        pipeline="HunyuanVideoImageToVideoPipeline",
        parts=parts_of_image_to_video,
        call=call_image_to_video,
    ),
    recipe(
        name="hunyuan-video-skyreels",
        pipeline="HunyuanSkyreelsImageToVideoPipeline",
        parts=parts_of_skyreels,
        call=lambda: call(image=make_image(SIZE), true_cfg_scale=2.0),
    ),
    recipe(
        name="hunyuan-video-framepack",
        pipeline="HunyuanVideoFramepackPipeline",
        parts=parts_of_framepack,
        call=lambda: call(image=make_image(64), height=64, width=64, latent_window_size=3),
    ),
    recipe(
        name="hunyuan-video-1-5-image-to-video",
        finish=shorten_text,
        pipeline="HunyuanVideo15ImageToVideoPipeline",
        parts=lambda: (
            parts_of_version_1_5(task_type="i2v")
            | {"image_encoder": siglip_vision(), "feature_extractor": siglip_image_processor()}
        ),
        call=lambda: unprompted(
            image=make_image(SIZE), prompt='a fox that says "hi"', negative_prompt="blue", num_frames=FRAMES
        ),
    ),
    recipe(
        name="hunyuan-video-1-5",
        finish=shorten_text,
        pipeline="HunyuanVideo15Pipeline",
        parts=parts_of_version_1_5,
        call=lambda: unprompted(
            prompt='a fox that says "hi"', negative_prompt="blue", height=SIZE, width=SIZE, num_frames=FRAMES
        ),
    ),
)
