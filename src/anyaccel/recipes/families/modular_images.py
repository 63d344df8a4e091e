"""Recipes for tiny modular Z-Image, ERNIE-Image and Krea 2 pipelines."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.families import ernie_image, krea, z_image
from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.calls import make_image, unprompted
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 16


def parts_of_krea() -> dict[str, Any]:
    """Return the components of a tiny modular Krea 2 pipeline."""
    components = krea.parts()
    return components


def call(**more: Any) -> dict[str, Any]:
    """Return call arguments for a 16x16 image."""
    return unprompted(output="images", prompt="a red fox", height=SIZE, width=SIZE) | more


RECIPES = (
    make_recipe(
        name="z-image-modular",
        pipeline="ZImageModularPipeline",
        family="z-image",
        parts=lambda: z_image.parts() | {"guider": diffusers.ClassifierFreeGuidance(guidance_scale=5.0)},
        call=lambda: call(negative_prompt="blue", max_sequence_length=64),
    ),
    make_recipe(
        name="z-image-modular-image-to-image",
        pipeline="ZImageModularPipeline",
        family="z-image",
        parts=z_image.parts,
        call=lambda: call(image=make_image(SIZE), strength=0.5, num_inference_steps=4, max_sequence_length=64),
    ),
    make_recipe(
        name="ernie-image-modular",
        pipeline="ErnieImageModularPipeline",
        family="ernie-image",
        parts=ernie_image.parts,
        call=call,
    ),
    make_recipe(
        name="krea-2-modular",
        pipeline="Krea2ModularPipeline",
        family="krea",
        parts=parts_of_krea,
        call=lambda: call(negative_prompt="blue", max_sequence_length=256),
    ),
    make_recipe(
        name="krea-2-turbo-modular",
        pipeline="Krea2TurboModularPipeline",
        family="krea",
        parts=parts_of_krea,
        call=lambda: call(max_sequence_length=256),
    ),
)
