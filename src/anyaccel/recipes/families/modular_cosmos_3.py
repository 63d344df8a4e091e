"""Recipes for tiny modular Cosmos 3 pipelines, whose transformer processes text, images and videos."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.families.cosmos_3 import SIZE, parts
from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.calls import make_image, unprompted
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

recipe = functools.partial(make_recipe, family="cosmos")


def parts_of_distilled() -> dict[str, Any]:
    """Return the components of a tiny distilled pipeline, which has fixed sigmas."""
    return parts() | {"scheduler": diffusers.FlowMatchEulerDiscreteScheduler(), "distilled_sigmas": [1.0, 0.5]}


def call(**more: Any) -> dict[str, Any]:
    """Return call arguments for a five-frame video that starts with an image."""
    return (
        unprompted(
            output="videos",
            prompt="a red fox",
            image=make_image(SIZE),
            height=SIZE,
            width=SIZE,
            num_frames=5,
            use_system_prompt=False,
        )
        | more
    )


RECIPES = (
    recipe(
        name="cosmos-3-modular",
        pipeline="Cosmos3OmniModularPipeline",
        parts=parts,
        call=lambda: call(negative_prompt="blue"),
    ),
    recipe(
        name="cosmos-3-distilled-modular",
        pipeline="Cosmos3DistilledModularPipeline",
        parts=parts_of_distilled,
        call=call,
    ),
)
