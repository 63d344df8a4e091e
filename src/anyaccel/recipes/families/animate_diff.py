"""Recipes for tiny AnimateDiff pipelines: Stable Diffusion with temporal attention layers."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.families import controlnet, stable_diffusion, stable_diffusion_xl
from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.calls import make_video, prompted
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES", "parts"]

SIZE = 16
FRAMES = 2

recipe = functools.partial(make_recipe, family="animate-diff")


def motion_adapter() -> Any:
    """Return a tiny motion adapter, which contains the temporal layers for AnimateDiff."""
    return diffusers.MotionAdapter(
        block_out_channels=(8, 16),
        motion_layers_per_block=1,
        motion_norm_num_groups=4,
        motion_num_attention_heads=2,
        motion_max_seq_length=8,
    )


def without(parts: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return a copy of `parts` without the named components, which AnimateDiff does not accept."""
    return {name: part for name, part in parts.items() if name not in names}


def parts(**more: Any) -> dict[str, Any]:
    """Return the components of a tiny AnimateDiff pipeline: Stable Diffusion and a motion adapter.

    The scheduler uses a linear beta schedule.
    """
    base = stable_diffusion.parts(
        scheduler=diffusers.DDIMScheduler(beta_schedule="linear", clip_sample=False, steps_offset=1),
        motion_adapter=motion_adapter(),
        **more,
    )
    return without(base, "safety_checker", "requires_safety_checker")


def parts_xl() -> dict[str, Any]:
    """Return the components of a tiny AnimateDiff pipeline based on SDXL."""
    scheduler = diffusers.DDIMScheduler(beta_schedule="linear", clip_sample=False, steps_offset=1)
    base = stable_diffusion_xl.parts(scheduler=scheduler, motion_adapter=motion_adapter())
    return without(base, "add_watermarker")


def sparse_controlnet() -> Any:
    """Return a tiny SparseControlNet, which receives condition images for only some frames."""
    return diffusers.SparseControlNetModel(
        conditioning_channels=4,
        down_block_types=("DownBlockMotion", "CrossAttnDownBlockMotion"),
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=TEXT_WIDTH,
        attention_head_dim=2,
        motion_max_seq_length=8,
        motion_num_attention_heads=2,
        conditioning_embedding_out_channels=(8, 16),
    )


def call(**more: Any) -> dict[str, Any]:
    """Return call arguments for a two-frame video."""
    return prompted(height=SIZE, width=SIZE, num_frames=FRAMES) | more


def call_halfway(**more: Any) -> dict[str, Any]:
    """Return call arguments for video-to-video at strength 0.5, which runs the last two of four steps."""
    return prompted(
        video=make_video(FRAMES, SIZE), height=SIZE, width=SIZE, strength=0.5, num_inference_steps=4, **more
    )


RECIPES = (
    recipe(name="animate-diff", pipeline="AnimateDiffPipeline", parts=parts, call=call),
    recipe(name="animate-diff-xl", pipeline="AnimateDiffSDXLPipeline", parts=parts_xl, call=call),
    recipe(
        name="animate-diff-controlnet",
        pipeline="AnimateDiffControlNetPipeline",
        parts=lambda: parts(controlnet=controlnet.controlnet()),
        call=lambda: call(conditioning_frames=make_video(FRAMES, SIZE)),
    ),
    recipe(
        name="animate-diff-sparse-controlnet",
        pipeline="AnimateDiffSparseControlNetPipeline",
        parts=lambda: parts(controlnet=sparse_controlnet()),
        call=lambda: call(conditioning_frames=make_video(1, SIZE), controlnet_frame_indices=[1]),
    ),
    recipe(
        name="animate-diff-video-to-video",
        pipeline="AnimateDiffVideoToVideoPipeline",
        parts=parts,
        call=call_halfway,
    ),
    recipe(
        name="animate-diff-video-to-video-controlnet",
        pipeline="AnimateDiffVideoToVideoControlNetPipeline",
        parts=lambda: parts(controlnet=controlnet.controlnet()),
        call=lambda: call_halfway(conditioning_frames=make_video(FRAMES, SIZE)),
    ),
)
