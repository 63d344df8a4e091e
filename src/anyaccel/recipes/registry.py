"""Which recipes there are: those of the files of this folder."""

from __future__ import annotations

import importlib
import pkgutil

from anyaccel.errors import AnyaccelError
from anyaccel.recipes.recipe import Recipe

__all__ = ["recipes"]


def recipes() -> dict[str, Recipe]:
    """Every recipe by its name, in the order of the files and of the recipes in them."""
    package = importlib.import_module(__package__)
    files = sorted(found.name for found in pkgutil.iter_modules(package.__path__))
    found: dict[str, Recipe] = {}
    for file in files:
        for recipe in getattr(importlib.import_module(f"{__package__}.{file}"), "RECIPES", ()):
            if recipe.name in found:
                raise AnyaccelError(f"two recipes are called {recipe.name!r}", hint=f"rename the one in {file}.py")
            found[recipe.name] = recipe
    return found
