"""Recipes for older video pipelines based on Stable Diffusion.

They cover ModelScope, I2VGen-XL, PIA and Text2Video-Zero.
"""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.families import animate_diff, stable_diffusion, stable_diffusion_xl
from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.calls import make_image, make_video, prompted
from anyaccel.recipes.parts.image_encoders import clip_image_processor, clip_vision
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 16
FRAMES = 2
SHAPE: dict[str, Any] = {
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
    "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
    "cross_attention_dim": TEXT_WIDTH,
    "norm_num_groups": 2,
}

recipe = functools.partial(make_recipe, family="text-to-video")


def base(**more: Any) -> dict[str, Any]:
    """Return the Stable Diffusion components shared by ModelScope, I2VGen-XL and PIA."""
    components = stable_diffusion.parts(
        scheduler=diffusers.DDIMScheduler(**stable_diffusion.scheduler(clip_sample=False)), **more
    )
    return animate_diff.without(components, "safety_checker", "requires_safety_checker")


def model_scope() -> dict[str, Any]:
    """Return the components of a tiny ModelScope text-to-video pipeline."""
    components = base(unet=diffusers.UNet3DConditionModel(attention_head_dim=4, **SHAPE))
    return animate_diff.without(components, "feature_extractor")


def i2vgen() -> dict[str, Any]:
    """Return the components of a tiny I2VGen-XL pipeline."""
    return base(
        unet=diffusers.I2VGenXLUNet(attention_head_dim=4, **SHAPE),
        image_encoder=clip_vision(),
        feature_extractor=clip_image_processor(),
    )


def pia() -> dict[str, Any]:
    """Return the components of a tiny PIA pipeline.

    Its motion adapter also replaces the first convolution of the UNet.
    """
    adapter = diffusers.MotionAdapter(
        block_out_channels=(8, 16),
        motion_layers_per_block=1,
        motion_norm_num_groups=4,
        motion_num_attention_heads=2,
        conv_in_channels=9,
    )
    return base(motion_adapter=adapter)


def call_zero(**more: Any) -> dict[str, Any]:
    """Return call arguments for Text2Video-Zero, which adds motion between two early denoising steps."""
    return prompted(video_length=FRAMES, height=SIZE, width=SIZE, num_inference_steps=3, t0=1, t1=2, **more)


RECIPES = (
    recipe(
        name="model-scope",
        pipeline="TextToVideoSDPipeline",
        parts=model_scope,
        call=lambda: prompted(height=SIZE, width=SIZE, num_frames=FRAMES),
    ),
    recipe(
        name="model-scope-video-to-video",
        pipeline="VideoToVideoSDPipeline",
        parts=model_scope,
        call=lambda: prompted(video=make_video(FRAMES, SIZE), strength=0.5, num_inference_steps=4),
    ),
    recipe(
        name="i2vgen-xl",
        pipeline="I2VGenXLPipeline",
        parts=i2vgen,
        call=lambda: prompted(image=make_image(SIZE), height=SIZE, width=SIZE, num_frames=FRAMES, clip_skip=None),
    ),
    recipe(
        name="pia",
        pipeline="PIAPipeline",
        parts=pia,
        call=lambda: prompted(image=make_image(SIZE), height=SIZE, width=SIZE, num_frames=FRAMES),
    ),
    recipe(
        name="text-to-video-zero",
        pipeline="TextToVideoZeroPipeline",
        parts=lambda: stable_diffusion.parts(
            scheduler=diffusers.DDIMScheduler(**stable_diffusion.scheduler(clip_sample=False))
        ),
        call=call_zero,
    ),
    recipe(
        name="text-to-video-zero-xl",
        pipeline="TextToVideoZeroSDXLPipeline",
        parts=lambda: stable_diffusion_xl.parts(
            scheduler=diffusers.DDIMScheduler(**stable_diffusion.scheduler(clip_sample=False))
        ),
        call=call_zero,
    ),
)
