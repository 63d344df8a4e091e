"""Recipes for tiny Helios pipelines, which generate a video in chunks, also from low to high resolution."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.families import wan
from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

# Two chunks of three latent frames, which are five frames each.
FRAMES = 10
CHUNK = 3

recipe = functools.partial(make_recipe, family="helios")


def transformer() -> Any:
    """Return a tiny Helios transformer."""
    return diffusers.HeliosTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=wan.CHANNELS,
        out_channels=wan.CHANNELS,
        text_dim=TEXT_WIDTH,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        rope_dim=(4, 4, 4),
    )


def parts(**more: Any) -> dict[str, Any]:
    """Return the components of a tiny Helios pipeline, which uses the Wan autoencoder and text encoder."""
    return (
        wan.parts(
            transformer=transformer(),
            scheduler=diffusers.HeliosScheduler(stages=1, stage_range=[0, 1], use_dynamic_shifting=True),
        )
        | more
    )


def parts_of_pyramid() -> dict[str, Any]:
    """Return the components of a tiny Helios pipeline with three resolutions, the lowest with a quarter of the size."""
    return parts(scheduler=diffusers.HeliosScheduler())


def call(**more: Any) -> dict[str, Any]:
    """Return call arguments for a video of two chunks."""
    return wan.call_embedded(num_frames=FRAMES, num_latent_frames_per_chunk=CHUNK) | more


def call_pyramid() -> dict[str, Any]:
    """Return call arguments with one step count per resolution."""
    arguments = call(pyramid_num_inference_steps_list=[2, 2, 2])
    del arguments["num_inference_steps"]
    return arguments


RECIPES = (
    recipe(name="helios", pipeline="HeliosPipeline", parts=parts, call=call),
    recipe(name="helios-pyramid", pipeline="HeliosPyramidPipeline", parts=parts_of_pyramid, call=call_pyramid),
)
