"""Recipes for tiny modular FLUX.1, FLUX.1 Kontext, FLUX.2 and FLUX.2 Klein pipelines."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.families import flux, flux_2
from anyaccel.recipes.parts.calls import make_image, unprompted
from anyaccel.recipes.parts.language_models import mistral_3
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 16

recipe = functools.partial(make_recipe, family="flux")
recipe_2 = functools.partial(make_recipe, family="flux-2")


def call(**more: Any) -> dict[str, Any]:
    """Return call arguments for a 16x16 image, with at most 32 prompt tokens."""
    return unprompted(output="images", prompt="a red fox", height=SIZE, width=SIZE, max_sequence_length=32) | more


def parts_of_flux_2() -> dict[str, Any]:
    """Return the components of a tiny modular FLUX.2 pipeline."""
    return flux_2.parts(text_encoder=mistral_3(), guidance_embeds=True)


def call_flux_2(**more: Any) -> dict[str, Any]:
    """Return call arguments for a 16x16 image and a reference image of the smallest size that FLUX.2 accepts.

    The sequence length fits the prompt and its chat template.
    """
    return call(image=make_image(64), max_sequence_length=64, text_encoder_out_layers=flux_2.LAYERS) | more


RECIPES = (
    recipe(
        name="flux-modular",
        pipeline="FluxModularPipeline",
        parts=flux.parts,
        call=lambda: call(guidance_scale=5.0),
    ),
    recipe(
        name="flux-modular-image-to-image",
        pipeline="FluxModularPipeline",
        parts=flux.parts,
        call=lambda: call(image=make_image(SIZE), strength=0.5, num_inference_steps=4, guidance_scale=5.0),
    ),
    recipe(
        name="flux-kontext-modular",
        pipeline="FluxKontextModularPipeline",
        parts=flux.parts,
        call=lambda: call(image=make_image(SIZE), _auto_resize=False, max_area=SIZE**2, guidance_scale=5.0),
    ),
    recipe_2(
        name="flux-2-modular",
        pipeline="Flux2ModularPipeline",
        parts=parts_of_flux_2,
        call=lambda: call_flux_2(guidance_scale=5.0),
    ),
    recipe_2(
        name="flux-2-klein-modular", pipeline="Flux2KleinModularPipeline", parts=flux_2.parts_of_klein, call=call_flux_2
    ),
    recipe_2(
        name="flux-2-klein-base-modular",
        pipeline="Flux2KleinBaseModularPipeline",
        parts=flux_2.parts_of_klein,
        call=call_flux_2,
    ),
)
