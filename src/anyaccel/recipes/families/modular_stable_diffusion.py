"""Recipes for tiny modular SDXL and Stable Diffusion 3 pipelines."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.families import stable_diffusion_3, stable_diffusion_xl
from anyaccel.recipes.parts.calls import make_image, mask, unprompted
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 16


def parts_of_xl(**more: Any) -> dict[str, Any]:
    """Return the components of a tiny modular SDXL pipeline."""
    components = stable_diffusion_xl.parts(**more)
    del components["add_watermarker"]  # only the standard pipeline has this option
    return components


def call(**more: Any) -> dict[str, Any]:
    """Return call arguments for a 16x16 image."""
    return unprompted(output="images", prompt="a red fox", negative_prompt="blue", height=SIZE, width=SIZE) | more


def call_halfway(**more: Any) -> dict[str, Any]:
    """Return call arguments for image-to-image at strength 0.5, which runs the last two of four steps."""
    return call(image=make_image(SIZE), strength=0.5, num_inference_steps=4, **more)


xl = functools.partial(
    make_recipe, pipeline="StableDiffusionXLModularPipeline", family="stable-diffusion-xl", parts=parts_of_xl
)
version_3 = functools.partial(
    make_recipe, pipeline="StableDiffusion3ModularPipeline", family="stable-diffusion-3", parts=stable_diffusion_3.parts
)

RECIPES = (
    xl(name="stable-diffusion-xl-modular", call=call),
    xl(name="stable-diffusion-xl-modular-image-to-image", call=call_halfway),
    xl(name="stable-diffusion-xl-modular-inpaint", call=lambda: call_halfway(mask_image=mask(SIZE))),
    version_3(name="stable-diffusion-3-modular", call=lambda: call(max_sequence_length=32)),
    version_3(name="stable-diffusion-3-modular-image-to-image", call=lambda: call_halfway(max_sequence_length=32)),
)
