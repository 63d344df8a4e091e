"""Builder for a small version of a model with random weights, based only on its config files.

Strings, booleans and floats in the configs come from the model. Integers, such as channel counts,
come from the tiny recipe for the same pipeline class. No weight files are opened.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.explanation.modular_folder import (
    choose_blocks,
    describe_blocks,
    make_empty_pipeline,
    read_modular_folder,
)
from anyaccel.recipes import Recipe
from anyaccel.recipes.recipe import assemble
from anyaccel.runtime.model_file_checks import INDEXES, check_index, has_custom_code
from anyaccel.tracing.model_folder import ModelFolder, is_a, read_model_folder, require_recipe
from anyaccel.upstream.modular_index import is_modular_folder

__all__ = ["SmallModel", "make_small_model", "merge_config"]


@dataclass(frozen=True, kw_only=True)
class SmallModel:
    """Recipe for the small model, and notes on how it differs from the full model."""

    recipe: Recipe
    notes: tuple[str, ...]


def make_small_model(path: Path) -> SmallModel:
    """Return a recipe that builds a small version of the model in the folder `path`."""
    modular = is_modular_folder(path)
    _reject_custom_code(path / INDEXES[modular])
    folder = read_modular_folder(path) if modular else read_model_folder(path)
    base = require_recipe(folder.pipeline)
    notes = [f"small model built from the configs, with random weights and the sizes of the recipe {base.name}"]
    notes += _describe_substitutes(folder, base)
    notes += describe_blocks(path, base) if modular else []
    make_components = functools.partial(_make_modular_parts if modular else _make_components, folder, base)
    recipe = Recipe(
        name=path.name,
        pipeline=folder.pipeline,
        family=base.family,
        make=functools.partial(assemble, folder.pipeline, make_components),
        call=functools.partial(_make_call, folder, base),
        prepare=base.prepare,
    )
    return SmallModel(recipe=recipe, notes=tuple(notes))


def _reject_custom_code(index: Path) -> None:
    if not index.is_file():
        return
    check_index(index, trusted=True)
    if has_custom_code(index):
        raise ModelError(
            f"{index.parent} contains custom code, which a check of a folder does not run",
            hint="review the code, then pass a function that loads the pipeline with trust_remote_code=True: "
            "anyaccel check package.module:make",
        )


def _describe_substitutes(folder: ModelFolder, base: Recipe) -> list[str]:
    """Return a note for each component that is taken from the recipe instead of the model.

    This happens if the component's class differs from the recipe's, or if it has no config.
    """
    tiny: Any = base.make()
    notes = []
    for component in folder.components:
        substitute = tiny.components.get(component.name)
        if substitute is not None and component.config is None:
            if hasattr(substitute, "parameters") or hasattr(substitute, "set_timesteps"):
                notes.append(f"{component.name}: no config found; using {type(substitute).__name__} of the recipe")
        elif hasattr(substitute, "parameters") and not is_a(substitute, component):
            notes.append(f"{component.name}: {type(substitute).__name__} replaces {component.kind}")
    return notes


def _make_components(folder: ModelFolder, base: Recipe) -> dict[str, Any]:
    """Return the components and the options for the small pipeline.

    A component is rebuilt from the model's config if its class matches the recipe's; otherwise, the
    recipe's component is used. Schedulers use the model's config unchanged.
    """
    tiny: Any = base.make()
    components = dict(tiny.components)
    # Options such as `is_distilled` are in model_index.json next to the components.
    options = {name for name in tiny.config if not name.startswith("_")} - set(components)
    components |= {name: value for name, value in folder.switches.items() if name in options}
    for component in folder.components:
        small = components.get(component.name)
        if component.config is None or small is None:
            continue
        if hasattr(small, "set_timesteps"):
            # A scheduler has no weights, so it is used at its real size.
            scheduler_class: Any = getattr(importlib.import_module(component.library), component.kind)
            components[component.name] = scheduler_class.from_config(dict(component.config))
        elif hasattr(small, "parameters") and is_a(small, component):
            components[component.name] = _rebuild(small, component.config)
    return components


def _make_modular_parts(folder: ModelFolder, base: Recipe) -> dict[str, Any]:
    """Return the blocks of a modular folder, and the components and config values that they expect."""
    empty: Any = make_empty_pipeline(folder.path)
    parts = _make_components(folder, base)
    stored = {component.name for component in folder.components}
    # The blocks themselves create the others, such as image processors.
    chosen = {name: value for name, value in parts.items() if name in stored or name in folder.switches}
    for component in folder.components:
        guider = chosen.get(component.name)
        # Its indices of layers are those of the tiny denoiser.
        if component.config is not None and hasattr(guider, "prepare_inputs") and is_a(guider, component):
            chosen[component.name] = _rebuild(guider, component.config)
    return chosen | {"blocks": choose_blocks(empty.blocks, base)}


def _rebuild(tiny: Any, config: Mapping[str, Any]) -> Any:
    """Return a component with the model's options and the tiny component's class and sizes."""
    tiny_config = tiny.config.to_dict() if hasattr(tiny.config, "to_dict") else dict(tiny.config)
    merged = merge_config(config, tiny_config)
    if hasattr(tiny.config, "to_dict"):  # a transformers config; diffusers uses dicts
        return type(tiny)(type(tiny.config)(**merged))
    return type(tiny).from_config(merged)


def merge_config(model: Mapping[str, Any], tiny: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two configs: strings, booleans and floats from the model, and integers from the tiny config.

    Lists keep the model's length, so a UNet with four levels still has four levels.
    """
    # Number of levels by length of a list in the tiny config, from the lists of block types. It applies where the model
    # has one integer for all levels and the tiny config has a list (`attention_head_dim`).
    lengths = {len(value): _length(model.get(name)) for name, value in tiny.items() if _is_list_of(value, str)}
    merged = {}
    for name, small in tiny.items():
        if name.startswith("_"):
            continue
        if name not in model:
            if _is_integer(small) or _is_list_of(small, int) or isinstance(small, Mapping):
                merged[name] = small
            continue
        merged[name] = _merge_value(model[name], small, lengths)
    return merged


def _merge_value(value: Any, small: Any, lengths: Mapping[int, int | None]) -> Any:
    if isinstance(value, Mapping) and isinstance(small, Mapping):
        return merge_config(value, small)
    if _is_list_of(small, int):
        # Repeat the last size for the levels that the tiny config does not have.
        length = _length(value) or lengths.get(len(small)) or len(small)
        return [*small, *[small[-1]] * length][:length]
    if _is_integer(small) or _is_integer(value) or _is_list_of(value, int):
        return small
    return value


def _is_integer(value: Any) -> bool:
    # bool is a subclass of int.
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list_of(value: Any, kind: type) -> bool:
    not_empty = isinstance(value, list | tuple) and len(value) > 0
    return not_empty and all(isinstance(item, kind) and not isinstance(item, bool) for item in value)


def _length(value: Any) -> int | None:
    return len(value) if isinstance(value, list | tuple) else None


def _make_call(folder: ModelFolder, base: Recipe) -> dict[str, Any]:
    """Return the recipe's call arguments, with the image size scaled for the model's VAE."""
    call = base.call()
    configs = {component.name: component.config for component in folder.components}
    tiny_scale, scale = _vae_scale(base.make()), _scale_of_config(configs.get("vae"))
    if tiny_scale and scale:
        for name in ("height", "width"):
            if isinstance(call.get(name), int):
                call[name] = call[name] * scale // tiny_scale
    return call


def _vae_scale(pipe: Any) -> int | None:
    vae = getattr(pipe, "vae", None)
    return _scale_of_config(getattr(vae, "config", None))


def _scale_of_config(config: Any) -> int | None:
    channels = (config or {}).get("block_out_channels")
    return None if channels is None else int(2 ** (len(channels) - 1))
