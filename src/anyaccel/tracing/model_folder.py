"""A model's folder as its small files describe it: the pipeline's class, its components, the sizes of its weights."""

from __future__ import annotations

import importlib
import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyaccel.errors import ModelError, nearest
from anyaccel.recipes import Recipe, recipes

__all__ = ["Component", "ModelFolder", "find_recipe", "is_a", "read_json", "read_model_folder", "require_recipe"]

_INDEX = "model_index.json"
_CONFIGS = ("config.json", "scheduler_config.json")
_WEIGHTS = "weights.json"


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


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """A pipeline on disk, without its weights."""

    path: Path
    pipeline: str
    """The class: `FluxPipeline`."""
    components: tuple[Component, ...]
    switches: Mapping[str, Any]
    """The pipeline's own settings: `force_zeros_for_empty_prompt`."""

    def stored_bytes(self) -> dict[str, int]:
        """The bytes of each component's weights as they are stored, by their files' headers; without what is not known.

        Where a component is stored in several types, the plain files count: diffusers loads those.
        """
        listed = self.path / _WEIGHTS
        if listed.is_file():
            files = {str(name): int(size) for name, size in read_json(listed)["files"].items()}
        else:
            found = [*self.path.glob("*/*.safetensors")]
            files = {file.relative_to(self.path).as_posix(): _data_bytes(file) for file in found}
        stored: dict[str, int] = {}
        for name, size in files.items():
            component, _, file = name.partition("/")
            if not re.search(r"\.(fp16|bf16)\b", file):
                stored[component] = stored.get(component, 0) + size
        return stored


def read_model_folder(path: Path) -> ModelFolder:
    """Read the small files of a pipeline's folder; no file of weights is opened."""
    index = read_json(path / _INDEX)
    entries = {name: entry for name, entry in index.items() if isinstance(entry, list) and len(entry) == 2}
    components = [
        Component(name=name, library=library, kind=kind, config=_read_config(path / name))
        for name, (library, kind) in entries.items()
        if library is not None
    ]
    switches = {name: entry for name, entry in index.items() if name not in entries and not name.startswith("_")}
    return ModelFolder(
        path=path, pipeline=str(index.get("_class_name")), components=tuple(components), switches=switches
    )


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
    from diffusers.models.model_loading_utils import _fetch_remapped_cls_from_config

    if type(ours).__name__ == component.kind or not isinstance(ours, ModelMixin) or not component.config:
        return type(ours).__name__ == component.kind
    older = getattr(importlib.import_module("diffusers"), component.kind, None)
    return older is not None and _fetch_remapped_cls_from_config(component.config, older) is type(ours)


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


def _read_config(folder: Path) -> dict[str, Any] | None:
    found = next((folder / name for name in _CONFIGS if (folder / name).is_file()), None)
    return None if found is None else read_json(found)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object; anything else is an error of the model's."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}", hint="give the folder of a diffusers pipeline") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is no description of a model", hint="give the folder of a diffusers pipeline")
    return content


def _data_bytes(file: Path) -> int:
    """How many bytes of numbers a file of weights has: what follows its header."""
    with file.open("rb") as stream:
        start = stream.read(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    return max(0, file.stat().st_size - 8 - length)
