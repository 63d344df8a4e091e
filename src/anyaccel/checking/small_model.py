"""A model's architecture, built small from its config files alone: its own switches, the sizes of a tiny recipe.

Every text, every yes or no and every fraction of a config is the model's own; the whole numbers, which are sizes, are
those of the recipe for the same pipeline, where they fit together. Weights are random. No file of weights is opened.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyaccel.recipes import Recipe
from anyaccel.recipes.recipe import assemble
from anyaccel.tracing.model_index import ModelFolder, is_a, read_model_folder, require_recipe

__all__ = ["SmallModel", "make_small_model", "merge_config"]


@dataclass(frozen=True, kw_only=True)
class SmallModel:
    """A recipe for the small model, and what the reader must know of it."""

    recipe: Recipe
    notes: tuple[str, ...]


def make_small_model(path: Path) -> SmallModel:
    """The recipe that builds a folder's architecture small."""
    folder = read_model_folder(path)
    base = require_recipe(folder.pipeline)
    notes = [f"built small from its config files, with random weights and the sizes of the recipe {base.name}"]
    notes += _find_strangers(folder, base)
    parts = functools.partial(_make_parts, folder, base)
    recipe = Recipe(
        name=path.name,
        pipeline=folder.pipeline,
        family=base.family,
        make=functools.partial(assemble, folder.pipeline, parts),
        call=functools.partial(_make_call, folder, base),
    )
    return SmallModel(recipe=recipe, notes=tuple(notes))


def _find_strangers(folder: ModelFolder, base: Recipe) -> list[str]:
    """Models whose class is not the recipe's: they are taken from the recipe, and the reader is told."""
    tiny: Any = base.make()
    told = []
    for component in folder.components:
        ours = tiny.components.get(component.name)
        if ours is not None and component.config is None:
            if hasattr(ours, "parameters") or hasattr(ours, "set_timesteps"):
                told.append(
                    f"{component.name}: there is no config of it; {type(ours).__name__} of the recipe stands in"
                )
        elif hasattr(ours, "parameters") and not is_a(ours, component):
            told.append(f"{component.name}: {type(ours).__name__} stands in for {component.kind}")
    return told


def _make_parts(folder: ModelFolder, base: Recipe) -> dict[str, Any]:
    """The components, rebuilt where their class is the same, and the pipeline's own switches."""
    tiny: Any = base.make()
    parts = dict(tiny.components)
    own = {name for name in tiny.config if not name.startswith("_")} - set(parts)
    parts |= {name: value for name, value in folder.switches.items() if name in own}
    for component in folder.components:
        ours = parts.get(component.name)
        if component.config is None or ours is None:
            continue
        if hasattr(ours, "set_timesteps"):
            kind: Any = getattr(importlib.import_module(component.library), component.kind)
            parts[component.name] = kind.from_config(dict(component.config))
        elif hasattr(ours, "parameters") and is_a(ours, component):
            parts[component.name] = _rebuild(ours, component.config)
    return parts


def _rebuild(tiny: Any, config: Mapping[str, Any]) -> Any:
    """A component of the same class with the model's switches and the tiny one's sizes."""
    ours = tiny.config.to_dict() if hasattr(tiny.config, "to_dict") else dict(tiny.config)
    merged = merge_config(config, ours)
    if hasattr(tiny.config, "to_dict"):  # transformers
        return type(tiny)(type(tiny.config)(**merged))
    return type(tiny).from_config(merged)


def merge_config(model: Mapping[str, Any], tiny: Mapping[str, Any]) -> dict[str, Any]:
    """The model's texts, switches and fractions with the tiny one's whole numbers.

    Lists keep the model's length: a model of four levels has four levels here.
    """
    longer = {len(value): _length(model.get(name)) for name, value in tiny.items() if _is_list_of(value, str)}
    merged = {}
    for name, small in tiny.items():
        if name.startswith("_"):
            continue
        if name not in model:
            if _is_whole(small) or _is_list_of(small, int) or isinstance(small, Mapping):
                merged[name] = small
            continue
        merged[name] = _merge_value(model[name], small, longer)
    return merged


def _merge_value(value: Any, small: Any, longer: Mapping[int, int | None]) -> Any:
    if isinstance(value, Mapping) and isinstance(small, Mapping):
        return merge_config(value, small)
    if _is_list_of(small, int):
        length = _length(value) or longer.get(len(small)) or len(small)
        return [*small, *[small[-1]] * length][:length]
    if _is_whole(small) or _is_whole(value) or _is_list_of(value, int):
        return small
    return value


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list_of(value: Any, kind: type) -> bool:
    filled = isinstance(value, list | tuple) and len(value) > 0
    return filled and all(isinstance(one, kind) and not isinstance(one, bool) for one in value)


def _length(value: Any) -> int | None:
    return len(value) if isinstance(value, list | tuple) else None


def _make_call(folder: ModelFolder, base: Recipe) -> dict[str, Any]:
    """The recipe's call, at a size that the model's own number of levels can have."""
    call = base.call()
    configs = {component.name: component.config for component in folder.components}
    before, after = _scale_of(base.make()), _scale_of_config(configs.get("vae"))
    if before and after:
        for name in ("height", "width"):
            if isinstance(call.get(name), int):
                call[name] = call[name] * after // before
    return call


def _scale_of(pipe: Any) -> int | None:
    vae = getattr(pipe, "vae", None)
    return _scale_of_config(getattr(vae, "config", None))


def _scale_of_config(config: Any) -> int | None:
    channels = (config or {}).get("block_out_channels")
    return None if channels is None else int(2 ** (len(channels) - 1))
