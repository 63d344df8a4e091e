"""Reader for a model folder's JSON files: pipeline class, components and weight file sizes."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anyaccel.errors import ModelError, nearest
from anyaccel.recipes import Recipe, recipes
from anyaccel.upstream.diffusers_internals import find_renamed_class

__all__ = ["Component", "ModelFolder", "find_recipe", "is_a", "read_json", "read_model_folder", "require_recipe"]

_INDEX = "model_index.json"
_CONFIGS = ("config.json", "scheduler_config.json", "guider_config.json")
# The sizes of a published model's weight files, in folders that have its configs only.
_WEIGHTS = "weights.json"
# `model.fp16.safetensors`: diffusers loads such files only with `variant="fp16"`.
_VARIANT = re.compile(r"\.(fp16|bf16)\b")


@dataclass(frozen=True, kw_only=True)
class Component:
    """A component of a pipeline, as listed in `model_index.json`."""

    name: str
    """`text_encoder_2`."""
    library: str
    kind: str
    """The class name in the index."""
    config: Mapping[str, Any] | None
    """Content of its config file, if it has one."""
    file: Path | None = None
    """Path of the config file."""


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """Contents of a pipeline folder, read from its JSON files without opening the weight files."""

    path: Path
    pipeline: str
    """The class: `FluxPipeline`."""
    components: tuple[Component, ...]
    switches: Mapping[str, Any]
    """Settings of the pipeline itself, such as `force_zeros_for_empty_prompt`."""
    absent: frozenset[str] = frozenset()
    """Components that the index lists as `[null, null]`: the model does not have them."""
    folders: Mapping[str, Path] = field(default_factory=dict)
    """Folders of components that are not in the folder of the pipeline, as in a modular pipeline."""
    make_empty: Callable[[Recipe], Any] | None = None
    """Returns the modular pipeline without its components, for the call of a recipe; None for a plain pipeline."""

    def find_folder(self, name: str) -> Path:
        """Return the folder of a component."""
        return self.folders.get(name, self.path / name)

    def missing_bytes(self, models: Iterable[str]) -> int | None:
        """Return the size in bytes of these models' weight files that have not been downloaded yet.

        Returns None if the size is unknown. If a model has weights in several dtypes, only the files
        without a variant suffix count, because diffusers loads those.
        """
        listed = self.path / _WEIGHTS
        if listed.is_file():  # a description of a published model, without its weights
            files = {str(name): int(size) for name, size in read_json(listed)["files"].items()}
            sizes = {name: _sum_plain(files, name) for name in models}
        else:
            sizes = {name: _missing_bytes(self.find_folder(name)) for name in models}
        present = [size for size in sizes.values() if size is not None]
        return sum(present) if len(present) == len(sizes) else None


def read_model_folder(path: Path) -> ModelFolder:
    """Read the JSON files in a pipeline's folder; weight files are not opened."""
    index = read_json(path / _INDEX)
    pipeline = index.pop("_class_name", None)
    if isinstance(pipeline, list):  # [Python file, class]: code in the folder, which is not run
        pipeline = ".".join(str(part) for part in pipeline)
    if not isinstance(pipeline, str):
        raise ModelError(
            f"{path / _INDEX} has no _class_name",
            hint="pass the folder of a diffusers pipeline",
        )
    # A component is a pair [library, class]; [null, null] is an optional component that the model does not have.
    entries = {name: entry for name, entry in index.items() if isinstance(entry, list) and len(entry) == 2}
    components = [
        _read_component(path, name, library, kind) for name, (library, kind) in entries.items() if library is not None
    ]
    switches = {name: entry for name, entry in index.items() if name not in entries and not name.startswith("_")}
    absent = frozenset(name for name, (library, _) in entries.items() if library is None)
    return ModelFolder(path=path, pipeline=pipeline, components=tuple(components), switches=switches, absent=absent)


def find_recipe(pipeline: str) -> Recipe | None:
    """Return the recipe for a pipeline class, or None; prefer the recipe that is named after the class."""
    by_class: dict[str, Recipe] = {}
    for recipe in recipes().values():
        if recipe.pipeline not in by_class or recipe.name == _to_kebab_case(recipe.pipeline):
            by_class[recipe.pipeline] = recipe
    return by_class.get(pipeline)


def _to_kebab_case(pipeline: str) -> str:
    """Convert a pipeline class name to kebab case: `StableDiffusionPipeline` becomes `stable-diffusion`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", pipeline.removesuffix("Pipeline")).lower()


def is_a(model: Any, component: Component) -> bool:
    """Return whether a model has the class named in `model_index.json`, even if the class was renamed."""
    from diffusers import ModelMixin

    if type(model).__name__ == component.kind or not isinstance(model, ModelMixin) or not component.config:
        return type(model).__name__ == component.kind
    # diffusers maps old class names to new ones by the config (Transformer2DModel is DiT or PixArt).
    older = getattr(importlib.import_module("diffusers"), component.kind, None)
    return older is not None and find_renamed_class(component.config, older) is type(model)


def require_recipe(pipeline: str) -> Recipe:
    """Return the recipe for a pipeline class; raise ModelError if there is none."""
    recipe = find_recipe(pipeline)
    if recipe is None:
        names = sorted({recipe.pipeline for recipe in recipes().values()})
        raise ModelError(
            f"no recipe is available for the pipeline class {pipeline}",
            hint="pass a function that creates the pipeline: anyaccel check package.module:make; "
            f"{nearest(pipeline, names)}",
        )
    return recipe


def _read_component(path: Path, name: str, library: Any, kind: Any) -> Component:
    if not isinstance(library, str) or not isinstance(kind, str):
        raise ModelError(
            f"{path / _INDEX} has an invalid entry for {name}: {[library, kind]}",
            hint='the entry must be a pair of strings, such as ["diffusers", "UNet2DConditionModel"]',
        )
    file = next((path / name / config for config in _CONFIGS if (path / name / config).is_file()), None)
    config = None if file is None else read_json(file)
    return Component(name=name, library=library, kind=kind, config=config, file=file)


def _missing_bytes(folder: Path) -> int | None:
    """Return the size in bytes of a model's weights if they must be downloaded, or None if unknown.

    The size is 0 if the folder contains safetensors files. Otherwise, it is read from the index file of
    the sharded weights.
    """
    if any(folder.glob("*.safetensors")):
        return 0
    # Sharded weights have an index with their total size; a single file has none.
    plain = [file for file in folder.glob("*.safetensors.index.json") if not _VARIANT.search(file.name)]
    size = read_json(plain[0]).get("metadata", {}).get("total_size") if plain else None
    return int(size) if isinstance(size, int | float) else None


def _sum_plain(files: Mapping[str, int], model: str) -> int | None:
    sizes = [size for name, size in files.items() if name.startswith(f"{model}/") and not _VARIANT.search(name)]
    return sum(sizes) if sizes else None


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file as a dict.

    Raises `ModelError` if the file cannot be read or does not contain a JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}", hint="copy or download the file again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} does not contain a JSON object", hint="copy or download the file again")
    return content
