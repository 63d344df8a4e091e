"""Recipes for tiny Wan Animate and AnyFlow pipelines.

Both use the Wan autoencoder and text encoder.
"""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.families import wan
from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.calls import make_image, make_video
from anyaccel.recipes.parts.image_encoders import IMAGE_WIDTH, clip_image_processor, clip_vision_model
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

recipe = functools.partial(make_recipe, family="wan")


def animate() -> dict[str, Any]:
    """Return the components of a tiny Wan Animate pipeline.

    It animates a character according to a face video and a pose video.
    """
    shape = wan.transformer_shape(
        in_channels=2 * wan.CHANNELS + 4,
        latent_channels=wan.CHANNELS,
        image_dim=IMAGE_WIDTH,
        added_kv_proj_dim=24,
        motion_encoder_channel_sizes={"4": 16, "8": 16, "16": 16},
        motion_encoder_size=16,
        motion_style_dim=8,
        motion_dim=4,
        motion_encoder_dim=16,
        face_encoder_hidden_dim=16,
        face_encoder_num_heads=2,
        inject_face_latents_blocks=2,
    )
    return wan.parts(
        vae=wan.autoencoder_wan(halvings=2),
        transformer=diffusers.WanAnimateTransformer3DModel(**shape),
        image_encoder=clip_vision_model(),
        image_processor=clip_image_processor(),
    )


def any_flow() -> dict[str, Any]:
    """Return the components of a tiny AnyFlow pipeline, which uses a flow-map scheduler."""
    return wan.parts(
        transformer=diffusers.AnyFlowTransformer3DModel(**wan.transformer_shape()),
        scheduler=diffusers.FlowMapEulerDiscreteScheduler(),
    )


def any_flow_far() -> dict[str, Any]:
    """Return the components of a tiny AnyFlow-FAR pipeline, which generates the latent frames in chunks.

    Frames of earlier chunks are compressed by larger patches.
    """
    shape = wan.transformer_shape(compressed_patch_size=(1, 4, 4), full_chunk_limit=2)
    return any_flow() | {"transformer": diffusers.AnyFlowFARTransformer3DModel(**shape)}


RECIPES = (
    recipe(
        name="wan-animate",
        pipeline="WanAnimatePipeline",
        parts=animate,
        call=lambda: wan.call_without_length(
            image=make_image(wan.SIZE),
            pose_video=make_video(wan.FRAMES, wan.SIZE),
            face_video=make_video(wan.FRAMES, wan.SIZE),
            segment_frame_length=wan.FRAMES,
        ),
    ),
    recipe(name="any-flow", pipeline="AnyFlowPipeline", parts=any_flow, call=wan.call_embedded),
    recipe(
        name="any-flow-far",
        pipeline="AnyFlowFARPipeline",
        parts=any_flow_far,
        # One chunk of two latent frames and one of one frame. Each shape of attention takes seconds to trace.
        call=lambda: wan.call_embedded(chunk_partition=[2, 1]),
    ),
)
