"""A model's folder as its small files describe it: the pipeline's class, its components, the sizes of its weights."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyaccel.errors import ModelError, nearest
from anyaccel.recipes import Recipe, recipes
from anyaccel.upstream.diffusers_internals import find_renamed_class

__all__ = ["Component", "ModelFolder", "find_recipe", "is_a", "read_json", "read_model_folder", "require_recipe"]

_INDEX = "model_index.json"
_CONFIGS = ("config.json", "scheduler_config.json")
_WEIGHTS = "weights.json"
_VARIANT = re.compile(r"\.(fp16|bf16)\b")


@dataclass(frozen=True, kw_only=True)
class Component:
    """One entry of a pipeline's index."""

    name: str
    """`text_encoder_2`."""
    library: str
    kind: str
    """The class, as the index names it."""
    config: Mapping[str, Any] | None
    """What its config file says; None where there is none."""
    file: Path | None = None
    """That file."""


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """A pipeline on disk, without its weights."""

    path: Path
    pipeline: str
    """The class: `FluxPipeline`."""
    components: tuple[Component, ...]
    switches: Mapping[str, Any]
    """The pipeline's own settings: `force_zeros_for_empty_prompt`."""

    def missing_bytes(self, models: Iterable[str]) -> int | None:
        """The bytes of some models' files of weights that are still to be fetched; None where that is not known.

        Where a model is stored in several types, the plain files count: diffusers loads those.
        """
        listed = self.path / _WEIGHTS
        if listed.is_file():  # a description, which has no weights beside it
            files = {str(name): int(size) for name, size in read_json(listed)["files"].items()}
            sizes = {name: _sum_plain(files, name) for name in models}
        else:
            sizes = {name: _missing_bytes(self.path / name) for name in models}
        known = [size for size in sizes.values() if size is not None]
        return sum(known) if len(known) == len(sizes) else None


def read_model_folder(path: Path) -> ModelFolder:
    """Read the small files of a pipeline's folder; no file of weights is opened."""
    index = read_json(path / _INDEX)
    if not isinstance(index.get("_class_name"), str):
        raise ModelError(
            f"{path / _INDEX} names no pipeline of diffusers as its _class_name",
            hint="give the folder of a diffusers pipeline",
        )
    entries = {name: entry for name, entry in index.items() if isinstance(entry, list) and len(entry) == 2}
    components = [
        _read_component(path, name, library, kind) for name, (library, kind) in entries.items() if library is not None
    ]
    switches = {name: entry for name, entry in index.items() if name not in entries and not name.startswith("_")}
    return ModelFolder(path=path, pipeline=index["_class_name"], components=tuple(components), switches=switches)


def find_recipe(pipeline: str) -> Recipe | None:
    """The tiny pipeline of a class: the one that is called as its class, or else the first; None if there is none."""
    known: dict[str, Recipe] = {}
    for recipe in recipes().values():
        if recipe.pipeline not in known or recipe.name == _kebab(recipe.pipeline):
            known[recipe.pipeline] = recipe
    return known.get(pipeline)


def _kebab(pipeline: str) -> str:
    """`StableDiffusionPipeline` → `stable-diffusion`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", pipeline.removesuffix("Pipeline")).lower()


def is_a(ours: Any, component: Component) -> bool:
    """Whether a model is of the class that an index names, by its name of today or by an older one."""
    from diffusers import ModelMixin

    if type(ours).__name__ == component.kind or not isinstance(ours, ModelMixin) or not component.config:
        return type(ours).__name__ == component.kind
    older = getattr(importlib.import_module("diffusers"), component.kind, None)
    return older is not None and find_renamed_class(component.config, older) is type(ours)


def require_recipe(pipeline: str) -> Recipe:
    """The tiny pipeline of a class, or an error that says which there are."""
    found = find_recipe(pipeline)
    if found is None:
        known = sorted({recipe.pipeline for recipe in recipes().values()})
        raise ModelError(
            f"no tiny pipeline of the class {pipeline} is known, whose sizes a small model could have",
            hint=f"check a function that makes one: anyaccel check package.module:make; {nearest(pipeline, known)}",
        )
    return found


def _read_component(path: Path, name: str, library: Any, kind: Any) -> Component:
    if not isinstance(library, str) or not isinstance(kind, str):
        raise ModelError(
            f"{path / _INDEX} names no class for {name}: {[library, kind]}", hint="an entry is a library and a class"
        )
    file = next((path / name / config for config in _CONFIGS if (path / name / config).is_file()), None)
    config = None if file is None else read_json(file)
    return Component(name=name, library=library, kind=kind, config=config, file=file)


def _missing_bytes(folder: Path) -> int | None:
    """0 where the weights lie beside the config; else what the index of their files says, if there is one."""
    if any(folder.glob("*.safetensors")):
        return 0
    plain = [file for file in folder.glob("*.safetensors.index.json") if not _VARIANT.search(file.name)]
    size = read_json(plain[0]).get("metadata", {}).get("total_size") if plain else None
    return int(size) if isinstance(size, int | float) else None


def _sum_plain(files: Mapping[str, int], model: str) -> int | None:
    sizes = [size for name, size in files.items() if name.startswith(f"{model}/") and not _VARIANT.search(name)]
    return sum(sizes) if sizes else None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object; anything else is an error of the model's."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}", hint="give the folder of a diffusers pipeline") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is no description of a model", hint="give the folder of a diffusers pipeline")
    return content
