"""Recipes grouped by pipeline family; each module defines its recipes in `RECIPES`."""
