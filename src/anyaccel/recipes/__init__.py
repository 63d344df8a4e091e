"""Every pipeline class of diffusers that runs here, tiny, with random weights and nothing to download.

A recipe is found by itself: a module of this folder with `RECIPES`. Neither the import nor `recipes()` loads torch.
"""

from anyaccel.recipes.not_covered import NOT_COVERED
from anyaccel.recipes.recipe import Recipe, run
from anyaccel.recipes.registry import recipes

__all__ = ["NOT_COVERED", "Recipe", "recipes", "run"]
