"""Registry of the recipes that are defined in the modules of `recipes/families/`."""

from __future__ import annotations

import importlib
import pkgutil

from anyaccel.errors import AnyaccelError
from anyaccel.recipes.recipe import Recipe

__all__ = ["recipes"]


def recipes() -> dict[str, Recipe]:
    """Return all recipes by name, in order of module name; raise if two recipes share a name."""
    package = importlib.import_module(f"{__package__}.families")
    by_name: dict[str, Recipe] = {}
    for module_name in sorted(module.name for module in pkgutil.iter_modules(package.__path__)):
        for recipe in importlib.import_module(f"{package.__name__}.{module_name}").RECIPES:
            if recipe.name in by_name:
                raise AnyaccelError(
                    f"duplicate recipe name: {recipe.name!r}", hint=f"rename the recipe in {module_name}.py"
                )
            by_name[recipe.name] = recipe
    return by_name
