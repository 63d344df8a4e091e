"""Recipes for tiny modular Z-Image, ERNIE-Image and Qwen-Image pipelines."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.families import ernie_image, qwen_image, z_image
from anyaccel.recipes.parts.calls import make_image, unprompted
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 16


def call(**more: Any) -> dict[str, Any]:
    """Return call arguments for a 16x16 image."""
    return unprompted(output="images", prompt="a red fox", height=SIZE, width=SIZE) | more


def call_halfway(**more: Any) -> dict[str, Any]:
    """Return call arguments for image-to-image at strength 0.5, which runs the last two of four steps."""
    return call(image=make_image(SIZE), strength=0.5, num_inference_steps=4, **more)


z = functools.partial(make_recipe, pipeline="ZImageModularPipeline", family="z-image", parts=z_image.parts)
qwen = functools.partial(make_recipe, pipeline="QwenImageModularPipeline", family="qwen-image", parts=qwen_image.parts)

RECIPES = (
    z(name="z-image-modular", call=lambda: call(max_sequence_length=64)),
    z(name="z-image-modular-image-to-image", call=lambda: call_halfway(max_sequence_length=64)),
    make_recipe(
        name="ernie-image-modular",
        pipeline="ErnieImageModularPipeline",
        family="ernie-image",
        parts=ernie_image.parts,
        call=lambda: call(negative_prompt="blue"),
    ),
    qwen(name="qwen-image-modular", call=lambda: call(negative_prompt="blue", max_sequence_length=300)),
    qwen(
        name="qwen-image-modular-image-to-image",
        call=lambda: call_halfway(negative_prompt="blue", max_sequence_length=300),
    ),
    qwen(
        name="qwen-image-modular-controlnet",
        parts=qwen_image.parts_with_controlnet,
        call=lambda: call(control_image=make_image(SIZE), negative_prompt="blue", max_sequence_length=300),
    ),
)
