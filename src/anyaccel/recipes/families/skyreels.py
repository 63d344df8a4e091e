"""Recipes for tiny SkyReels V2 pipelines: text-to-video, image-to-video and diffusion forcing."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.families import wan
from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.calls import make_image, make_video
from anyaccel.recipes.parts.image_encoders import IMAGE_WIDTH, clip_image_processor, clip_vision
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

recipe = functools.partial(make_recipe, family="skyreels")


def parts(**more: Any) -> dict[str, Any]:
    """Return the components of a tiny SkyReels V2 pipeline: a Wan pipeline with a different transformer."""
    return wan.parts(transformer=diffusers.SkyReelsV2Transformer3DModel(**wan.transformer_shape(**more)))


def parts_for_images() -> dict[str, Any]:
    """Return the components of a tiny SkyReels V2 image-to-video pipeline.

    The transformer also receives image latents and a frame mask.
    """
    base = parts(in_channels=2 * wan.CHANNELS + wan.TIME_SCALE, image_dim=IMAGE_WIDTH, added_kv_proj_dim=24)
    return base | {"image_encoder": clip_vision(), "image_processor": clip_image_processor()}


def call_forcing(**more: Any) -> dict[str, Any]:
    """Return call arguments for diffusion forcing, in which each block of frames has its own noise level."""
    return wan.call_embedded(base_num_frames=wan.FRAMES, **more)


RECIPES = (
    recipe(name="skyreels", pipeline="SkyReelsV2Pipeline", parts=parts, call=wan.call_embedded),
    recipe(
        name="skyreels-image-to-video",
        pipeline="SkyReelsV2ImageToVideoPipeline",
        parts=parts_for_images,
        call=lambda: wan.call_embedded(image=make_image(wan.SIZE)),
    ),
    recipe(
        name="skyreels-forcing",
        pipeline="SkyReelsV2DiffusionForcingPipeline",
        parts=parts,
        call=call_forcing,
    ),
    recipe(
        name="skyreels-forcing-image-to-video",
        pipeline="SkyReelsV2DiffusionForcingImageToVideoPipeline",
        parts=parts,
        call=lambda: call_forcing(image=make_image(wan.SIZE)),
    ),
    recipe(
        name="skyreels-forcing-video-to-video",
        pipeline="SkyReelsV2DiffusionForcingVideoToVideoPipeline",
        parts=parts,
        call=lambda: call_forcing(video=make_video(wan.FRAMES, wan.SIZE), overlap_history=3, num_frames=9),
    ),
)
