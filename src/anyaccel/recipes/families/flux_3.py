"""Recipes for tiny FLUX.3 pipelines, which are modular, with a reference image."""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.families.flux_2 import LAYERS, autoencoder_flux_2
from anyaccel.recipes.lazy_modules import diffusers
from anyaccel.recipes.parts.calls import make_image, unprompted
from anyaccel.recipes.parts.language_models import qwen_3_vl
from anyaccel.recipes.parts.processors import qwen_3_vl_processor
from anyaccel.recipes.parts.text_encoders import TEXT_WIDTH
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 16

recipe = functools.partial(make_recipe, family="flux-3")


def parts(blocks: str, *, flow_map: bool = False) -> dict[str, Any]:
    """Return the components of a tiny FLUX.3 pipeline with the given blocks, without the prompt upsampler.

    A flow map also receives the timestep to jump to.
    """
    made = getattr(diffusers, blocks)()
    del made.sub_blocks["prompt_upsampler"]
    return {
        "blocks": made,
        "vae": autoencoder_flux_2(),
        "text_encoder": qwen_3_vl(),
        "tokenizer": qwen_3_vl_processor(),
        "transformer": diffusers.Flux3Transformer2DModel(
            in_channels=16,
            cond_in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=len(LAYERS) * TEXT_WIDTH,
            timestep_channels=32,
            axes_dims_rope=(4, 4, 4, 4),
            flow_map=flow_map,
        ),
    }


def call(**more: Any) -> dict[str, Any]:
    """Return call arguments for a 16x16 image and a reference image."""
    return (
        unprompted(
            output="images",
            prompt="a red fox",
            image=make_image(SIZE),
            height=SIZE,
            width=SIZE,
            text_encoder_out_layers=LAYERS,
        )
        | more
    )


RECIPES = (
    recipe(
        name="flux-3",
        pipeline="Flux3ModularPipeline",
        parts=lambda: parts("Flux3AutoBlocks"),
        call=lambda: call(negative_prompt="blue"),
    ),
    recipe(
        name="flux-3-distilled",
        pipeline="Flux3DistilledModularPipeline",
        parts=lambda: parts("Flux3DistilledAutoBlocks", flow_map=True),
        call=call,
    ),
)
