"""Recipe for a tiny modular Ideogram 4 pipeline."""

from __future__ import annotations

from anyaccel.recipes.families.ideogram_4 import SIZE, parts
from anyaccel.recipes.parts.calls import unprompted
from anyaccel.recipes.recipe import make_recipe

__all__ = ["RECIPES"]

RECIPES = (
    make_recipe(
        name="ideogram-4-modular",
        pipeline="Ideogram4ModularPipeline",
        family="ideogram-4",
        parts=parts,
        # One guidance scale per step.
        call=lambda: unprompted(
            output="images",
            prompt="a red fox",
            height=SIZE,
            width=SIZE,
            guidance_schedule=(7.0, 3.0),
            max_sequence_length=64,
        ),
    ),
)
