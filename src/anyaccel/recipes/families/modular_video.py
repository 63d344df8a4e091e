"""Recipes for tiny modular LTX-Video and HunyuanVideo 1.5 pipelines: text-to-video and image-to-video."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.families import hunyuan_video, ltx
from anyaccel.recipes.parts.calls import make_image, unprompted
from anyaccel.recipes.parts.image_encoders import siglip_image_processor, siglip_vision
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

ltx_recipe = functools.partial(make_recipe, pipeline="LTXModularPipeline", family="ltx", parts=ltx.parts)
hunyuan_recipe = functools.partial(make_recipe, pipeline="HunyuanVideo15ModularPipeline", family="hunyuan-video")


def call_ltx(**more: Any) -> dict[str, Any]:
    """Return call arguments for a nine-frame video."""
    return (
        unprompted(
            output="videos",
            prompt="a red fox",
            negative_prompt="blue",
            height=ltx.SIZE,
            width=ltx.SIZE,
            num_frames=ltx.FRAMES,
            max_sequence_length=32,
        )
        | more
    )


def call_hunyuan(**more: Any) -> dict[str, Any]:
    """Return call arguments for a five-frame video and a prompt with quoted text, which ByT5 encodes."""
    return (
        unprompted(
            output="videos",
            prompt='a fox that says "hi"',
            negative_prompt="blue",
            height=hunyuan_video.SIZE,
            width=hunyuan_video.SIZE,
            num_frames=hunyuan_video.FRAMES,
        )
        | more
    )


RECIPES = (
    ltx_recipe(name="ltx-modular", call=call_ltx),
    ltx_recipe(name="ltx-modular-image-to-video", call=lambda: call_ltx(image=make_image(ltx.SIZE))),
    hunyuan_recipe(name="hunyuan-video-1-5-modular", parts=hunyuan_video.parts_of_version_1_5, call=call_hunyuan),
    hunyuan_recipe(
        name="hunyuan-video-1-5-modular-image-to-video",
        parts=lambda: (
            hunyuan_video.parts_of_version_1_5(task_type="i2v")
            | {"image_encoder": siglip_vision(), "feature_extractor": siglip_image_processor()}
        ),
        # Two latents per side: for a single one, torch finds no attention kernel on CUDA (torch 2.11).
        call=lambda: call_hunyuan(
            image=make_image(2 * hunyuan_video.SIZE), height=2 * hunyuan_video.SIZE, width=2 * hunyuan_video.SIZE
        ),
    ),
)
