"""Recipe for a tiny Echo pipeline, which is modular and uses the models of LTX-2."""

from __future__ import annotations

from typing import Any

from anyaccel.recipes.families import ltx_2
from anyaccel.recipes.parts.calls import make_image, unprompted
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]


def parts() -> dict[str, Any]:
    """Return the components of a tiny Echo pipeline, which has fixed sigmas instead of a scheduler."""
    return {name: part for name, part in ltx_2.parts().items() if name != "scheduler"}


def call() -> dict[str, Any]:
    """Return call arguments for a five-frame video with an image in its memory, and two sigmas instead of eight."""
    arguments = unprompted(
        output="videos",
        prompt="a red fox",
        image=make_image(ltx_2.SIZE),
        height=ltx_2.SIZE,
        width=ltx_2.SIZE,
        num_frames=ltx_2.FRAMES,
        max_sequence_length=16,
        sigmas=(1.0, 0.5, 0.0),
    )
    del arguments["num_inference_steps"]
    return arguments


RECIPES = (make_recipe(name="echo", pipeline="EchoModularPipeline", family="ltx", parts=parts, call=call),)
