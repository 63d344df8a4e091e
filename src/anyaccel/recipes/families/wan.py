"""Recipes for tiny Wan pipelines: text-to-video, image-to-video, video-to-video, VACE and editing."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.calls import embedding, make_image, make_video, prompted
from anyaccel.recipes.parts.image_encoders import IMAGE_WIDTH, clip_image_processor, clip_vision_model
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH, umt5_encoder
from anyaccel.recipes.parts.tokenizers import t5_tokenizer
from anyaccel.recipes.recipe import make_recipe

__all__ = [
    "CHANNELS",
    "FRAMES",
    "RECIPES",
    "SIZE",
    "TIME_SCALE",
    "autoencoder_wan",
    "call",
    "call_embedded",
    "call_without_length",
    "parts",
    "transformer_shape",
]

SIZE = 16
FRAMES = 5
CHANNELS = 4
TIME_SCALE = 2

recipe = functools.partial(make_recipe, family="wan")


def autoencoder_wan(*, halvings: int = 1, **more: Any) -> Any:
    """Return a tiny Wan autoencoder.

    It halves the width, height and frame count `halvings` times; the first frame is always kept.
    """
    return diffusers.AutoencoderKLWan(
        **{
            "base_dim": 8,
            "z_dim": CHANNELS,
            "dim_mult": [1] + [2] * halvings,
            "num_res_blocks": 1,
            "temperal_downsample": [True] * halvings,
            "latents_mean": [0.0] * CHANNELS,
            "latents_std": [1.0] * CHANNELS,
            "scale_factor_temporal": TIME_SCALE**halvings,
            "scale_factor_spatial": 2**halvings,
        }
        | more
    )


def transformer_shape(**more: Any) -> dict[str, Any]:
    """Return constructor arguments for a tiny transformer: two layers with two heads of width 12."""
    return {
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "in_channels": CHANNELS,
        "out_channels": CHANNELS,
        "text_dim": TEXT_WIDTH,
        "freq_dim": 32,
        "ffn_dim": 32,
        "num_layers": 2,
        "rope_max_seq_len": 32,
    } | more


def parts(**more: Any) -> dict[str, Any]:
    """Return the components of a tiny Wan 2.1 pipeline."""
    return {
        "tokenizer": t5_tokenizer(),
        "text_encoder": umt5_encoder(),
        "vae": autoencoder_wan(),
        "scheduler": diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        "transformer": diffusers.WanTransformer3DModel(**transformer_shape()),
    } | more


def parts_of_two_experts() -> dict[str, Any]:
    """Return the components of a tiny Wan 2.2 pipeline.

    It has separate transformers for high-noise and low-noise steps.
    """
    return parts(transformer_2=diffusers.WanTransformer3DModel(**transformer_shape()), boundary_ratio=0.875)


def parts_for_images() -> dict[str, Any]:
    """Return the components of a tiny Wan image-to-video pipeline.

    The transformer also receives image latents and a frame mask.
    """
    shape = transformer_shape(in_channels=2 * CHANNELS + TIME_SCALE, image_dim=IMAGE_WIDTH, added_kv_proj_dim=24)
    return parts(
        transformer=diffusers.WanTransformer3DModel(**shape),
        image_encoder=clip_vision_model(),
        image_processor=clip_image_processor(),
    )


def parts_of_vace() -> dict[str, Any]:
    """Return the components of a tiny Wan VACE pipeline.

    The control branch of the transformer receives the latents of two videos and a mask.
    """
    shape = transformer_shape(vace_layers=[0, 1], vace_in_channels=2 * CHANNELS + 2**2)
    return parts(transformer=diffusers.WanVACETransformer3DModel(**shape))


def call(**more: Any) -> dict[str, Any]:
    """Return call arguments for a five-frame video."""
    return prompted(negative_prompt="blue", height=SIZE, width=SIZE, num_frames=FRAMES, max_sequence_length=32) | more


def call_embedded(**more: Any) -> dict[str, Any]:
    """Return call arguments with prompt embeddings instead of a prompt.

    Some pipelines clean prompts with ftfy, which is not a dependency of anyaccel.
    """
    embedded = {
        "prompt_embeds": embedding(1, 32, TEXT_WIDTH),
        "negative_prompt_embeds": embedding(1, 32, TEXT_WIDTH, seed=4),
    }
    return call(prompt=None, negative_prompt=None, **embedded) | more


def call_without_length(**more: Any) -> dict[str, Any]:
    """Return call arguments without a frame count, for pipelines that read it from an input video."""
    arguments = call_embedded(**more)
    del arguments["num_frames"]
    return arguments


def call_halfway() -> dict[str, Any]:
    """Return call arguments for video-to-video at strength 0.5, which runs the last two of four steps."""
    return call_without_length(video=make_video(FRAMES, SIZE), strength=0.5, num_inference_steps=4)


def parts_of_lucy() -> dict[str, Any]:
    """Return the components of a tiny Lucy Edit pipeline.

    The transformer receives the noisy latents concatenated with the latents of the input video.
    """
    return parts(transformer=diffusers.WanTransformer3DModel(**transformer_shape(in_channels=2 * CHANNELS)))


def parts_of_chrono_edit() -> dict[str, Any]:
    """Return the components of a tiny ChronoEdit pipeline.

    ChronoEdit generates the edited image as the last frame of a video.
    """
    base = parts_for_images()
    shape = transformer_shape(in_channels=2 * CHANNELS + TIME_SCALE, image_dim=IMAGE_WIDTH, added_kv_proj_dim=24)
    return base | {"transformer": diffusers.ChronoEditTransformer3DModel(**shape)}


RECIPES = (
    recipe(
        name="lucy-edit",
        pipeline="LucyEditPipeline",
        parts=parts_of_lucy,
        call=lambda: call_embedded(video=make_video(FRAMES, SIZE)),
    ),
    recipe(
        name="chrono-edit",
        pipeline="ChronoEditPipeline",
        parts=parts_of_chrono_edit,
        call=lambda: call_embedded(image=make_image(SIZE)),
    ),
    recipe(name="wan", pipeline="WanPipeline", parts=parts, call=call),
    recipe(name="wan-two-experts", pipeline="WanPipeline", parts=parts_of_two_experts, call=call),
    recipe(
        name="wan-image-to-video",
        pipeline="WanImageToVideoPipeline",
        parts=parts_for_images,
        call=lambda: call_embedded(image=make_image(SIZE)),
    ),
    recipe(name="wan-video-to-video", pipeline="WanVideoToVideoPipeline", parts=parts, call=call_halfway),
    recipe(
        name="wan-vace",
        pipeline="WanVACEPipeline",
        parts=parts_of_vace,
        call=lambda: call_embedded(video=make_video(FRAMES, SIZE)),
    ),
)
