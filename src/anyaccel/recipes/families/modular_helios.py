"""Recipes for tiny modular Helios pipelines, which generate a video in chunks, also from low to high resolution."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.families import modular_wan
from anyaccel.recipes.families.helios import CHUNK, FRAMES, transformer
from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

recipe = functools.partial(make_recipe, family="helios")


def parts(blocks: str, *, scheduler: Any) -> dict[str, Any]:
    """Return the components of a tiny modular Helios pipeline, which uses the autoencoder of Wan."""
    return modular_wan.parts(blocks, transformer=transformer(), scheduler=scheduler)


def call(**more: Any) -> dict[str, Any]:
    """Return call arguments for a video of two chunks."""
    return modular_wan.call(num_frames=FRAMES, num_latent_frames_per_chunk=CHUNK) | more


def call_pyramid() -> dict[str, Any]:
    """Return call arguments with one step count per resolution."""
    arguments = call(pyramid_num_inference_steps_list=[2, 2, 2])
    del arguments["num_inference_steps"]
    return arguments


RECIPES = (
    recipe(
        name="helios-modular",
        pipeline="HeliosModularPipeline",
        parts=lambda: parts(
            "HeliosAutoBlocks",
            scheduler=diffusers.HeliosScheduler(stages=1, stage_range=[0, 1], use_dynamic_shifting=True),
        ),
        call=call,
    ),
    recipe(
        name="helios-pyramid-modular",
        pipeline="HeliosPyramidModularPipeline",
        parts=lambda: parts("HeliosPyramidAutoBlocks", scheduler=diffusers.HeliosScheduler()),
        call=call_pyramid,
    ),
    recipe(
        name="helios-pyramid-distilled-modular",
        pipeline="HeliosPyramidDistilledModularPipeline",
        parts=lambda: parts("HeliosPyramidDistilledAutoBlocks", scheduler=diffusers.HeliosDMDScheduler()),
        call=call_pyramid,
    ),
)
