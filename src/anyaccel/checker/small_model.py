"""A model's architecture, built small from its config files alone: its own switches, the sizes of a tiny recipe.

Every text, every yes or no and every fraction of a config is the model's own; the whole numbers, which are sizes, are
those of the recipe for the same pipeline, where they fit together. Weights are random. No file of weights is opened.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyaccel.errors import ModelError, nearest
from anyaccel.recipes import Recipe, recipes
from anyaccel.recipes.recipe import assemble

__all__ = ["SmallModel", "make_small_model", "merge_config"]

_INDEX = "model_index.json"
_CONFIGS = ("config.json", "scheduler_config.json")


@dataclass(frozen=True, kw_only=True)
class SmallModel:
    """A recipe for the small model, and what the reader must know of it."""

    recipe: Recipe
    notes: tuple[str, ...]


def make_small_model(folder: Path) -> SmallModel:
    """The recipe that builds a folder's architecture small."""
    index = _read(folder / _INDEX)
    kind = str(index.get("_class_name"))
    base = _find_recipe(kind)
    notes = [f"built small from its config files, with random weights and the sizes of the recipe {base.name}"]
    notes += _find_strangers(folder, index, base)
    parts = functools.partial(_make_parts, folder, index, base)
    recipe = Recipe(
        name=folder.name,
        pipeline=kind,
        family=base.family,
        make=functools.partial(assemble, kind, parts),
        call=functools.partial(_make_call, folder, index, base),
    )
    return SmallModel(recipe=recipe, notes=tuple(notes))


def _find_recipe(kind: str) -> Recipe:
    known: dict[str, Recipe] = {}
    for recipe in recipes().values():  # the one that is called as its class wins, then the first
        if recipe.pipeline not in known or recipe.name == _kebab(recipe.pipeline):
            known[recipe.pipeline] = recipe
    if kind not in known:
        raise ModelError(
            f"no tiny pipeline of the class {kind} is known, whose sizes a small model could have",
            hint=f"check a function that makes one: anyaccel check package.module:make; {nearest(kind, known)}",
        )
    return known[kind]


def _kebab(pipeline: str) -> str:
    """`StableDiffusionPipeline` → `stable-diffusion`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", pipeline.removesuffix("Pipeline")).lower()


def _find_strangers(folder: Path, index: Mapping[str, Any], base: Recipe) -> list[str]:
    """Models whose class is not the recipe's: they are taken from the recipe, and the reader is told."""
    tiny: Any = base.make()
    told = []
    for name, _, kind in _components(index):
        ours = tiny.components.get(name)
        if ours is not None and _read_config(folder / name) is None:
            if hasattr(ours, "parameters") or hasattr(ours, "set_timesteps"):
                told.append(f"{name}: there is no config of it; {type(ours).__name__} of the recipe stands in")
        elif hasattr(ours, "parameters") and not _is_a(ours, kind, _read_config(folder / name)):
            told.append(f"{name}: {type(ours).__name__} stands in for {kind}")
    return told


def _is_a(ours: Any, kind: str, config: Mapping[str, Any] | None) -> bool:
    """Whether a component is of the class that a model names, by its name of today or by an older one."""
    from diffusers import ModelMixin
    from diffusers.models.model_loading_utils import _fetch_remapped_cls_from_config

    if type(ours).__name__ == kind or not isinstance(ours, ModelMixin) or not config:
        return type(ours).__name__ == kind
    older = getattr(importlib.import_module("diffusers"), kind, None)
    return older is not None and _fetch_remapped_cls_from_config(config, older) is type(ours)


def _components(index: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Name, library and class of each component that a model has."""
    return [
        (name, entry[0], entry[1]) for name, entry in index.items() if isinstance(entry, list) and entry[0] is not None
    ]


def _make_parts(folder: Path, index: Mapping[str, Any], base: Recipe) -> dict[str, Any]:
    """The components, rebuilt where their class is the same, and the pipeline's own switches."""
    tiny: Any = base.make()
    parts = dict(tiny.components)
    own = {name for name in tiny.config if not name.startswith("_")} - set(parts)
    parts |= {name: index[name] for name in own if name in index and not isinstance(index[name], list)}
    for name, library, kind in _components(index):
        config = _read_config(folder / name)
        ours = parts.get(name)
        if config is None or ours is None:
            continue
        if hasattr(ours, "set_timesteps"):
            parts[name] = getattr(importlib.import_module(library), kind).from_config(config)
        elif hasattr(ours, "parameters") and _is_a(ours, kind, config):
            parts[name] = _rebuild(ours, config)
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


def _make_call(folder: Path, index: Mapping[str, Any], base: Recipe) -> dict[str, Any]:
    """The recipe's call, at a size that the model's own number of levels can have."""
    call = base.call()
    before, after = _scale_of(base.make()), _scale_of_config(_read_config(folder / "vae"))
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


def _read_config(folder: Path) -> dict[str, Any] | None:
    found = next((folder / name for name in _CONFIGS if (folder / name).is_file()), None)
    return None if found is None else _read(found)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}", hint="give the folder of a diffusers pipeline") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is no description of a model", hint="give the folder of a diffusers pipeline")
    return content
