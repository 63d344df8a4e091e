"""Tiny versions of the diffusers pipelines with random weights; nothing is downloaded.

A new recipe needs no registration: `recipes()` scans the modules in `families/` for `RECIPES`.
Neither importing this package nor calling `recipes()` imports torch.
"""

from anyaccel.recipes.not_covered import NOT_COVERED
from anyaccel.recipes.recipe import Recipe, run
from anyaccel.recipes.registry import recipes

__all__ = ["NOT_COVERED", "Recipe", "recipes", "run"]
