"""Recipes by pipeline family; each module lists its recipes in `RECIPES`."""
