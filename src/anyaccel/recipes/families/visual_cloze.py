"""Recipes for tiny VisualCloze pipelines, which infer a task from example images.

The pipelines use the components of FLUX.1 Fill.
"""

from __future__ import annotations

import functools
from typing import Any

from anyaccel.recipes.families import flux
from anyaccel.recipes.parts.calls import make_image, unprompted
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

SIZE = 32

recipe = functools.partial(make_recipe, family="visual-cloze")


def parts() -> dict[str, Any]:
    """Return the components of a tiny VisualCloze pipeline, which are those of FLUX.1 Fill."""
    return flux.parts(in_channels=3 * flux.PATCH) | {"resolution": SIZE}


def call() -> dict[str, Any]:
    """Return call arguments with a task prompt, a pair of example images and an image to process."""
    return unprompted(
        task_prompt="turn blue",
        content_prompt="a red fox",
        image=[[make_image(SIZE), make_image(SIZE, seed=2)], [make_image(SIZE, seed=3), None]],
        guidance_scale=30.0,
        max_sequence_length=256,
    )


def disable_progress_bars(pipe: Any) -> None:
    """Disable the progress bars of the nested generation and upsampling pipelines."""
    for inner in (pipe.generation_pipe, pipe.upsampling_pipe):
        inner.set_progress_bar_config(disable=True)


RECIPES = (
    recipe(name="visual-cloze-generation", pipeline="VisualClozeGenerationPipeline", parts=parts, call=call),
    recipe(
        name="visual-cloze",
        pipeline="VisualClozePipeline",
        parts=parts,
        finish=disable_progress_bars,
        call=lambda: (
            call()
            | {
                "upsampling_height": SIZE,
                "upsampling_width": SIZE,
                "upsampling_strength": 0.5,
                "num_inference_steps": 4,
            }
        ),
    ),
)
