"""Checks on model files before loading: they must be complete, readable and free of executable code."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from anyaccel.errors import ModelError, ModelFileError
from anyaccel.runtime.weight_files.checks import PICKLES, WEIGHTS, check_weight_file, make_pickle_error

__all__ = ["INDEXES", "check_index", "check_model_folder", "check_weights", "has_custom_code", "is_single_file"]

INDEXES = ("model_index.json", "modular_model_index.json")


def is_single_file(model: Any) -> bool:
    """Return whether a model is a weights file (path or URL) rather than a folder or a Hub ID."""
    text = str(model)
    return text.endswith(WEIGHTS) and (Path(text).is_file() or text.startswith(("http://", "https://")))


def check_model_folder(model: Any, *, pickles: bool, trusted: bool) -> None:
    """Raise `ModelError` if a local model cannot be loaded or would run code; do not check a Hub ID.

    `pickles` allows pickled weights, and `trusted` allows custom code.
    """
    path = Path(str(model)).expanduser()
    if path.is_file():
        check_weight_file(path, pickles=pickles)
        return
    if not path.is_dir():
        # A Hub ID has at most one slash and does not start like a path.
        if (
            str(model).startswith((".", "/", "~"))
            or str(model).count("/") > 1
            or (os.sep != "/" and os.sep in str(model))
        ):
            raise ModelFileError(f"the folder {model} does not exist", hint="check the path")
        return
    index = next((path / name for name in INDEXES if (path / name).is_file()), None)
    if index is None:
        raise ModelFileError(f"{model} is not a pipeline: it has no model_index.json", hint=_suggest_folder(path))
    check_index(index, trusted)
    check_weights(path, pickles=pickles)


def check_weights(folder: Path, *, pickles: bool) -> None:
    """Raise `ModelError` if files of weights in the folder of a pipeline or component cannot be loaded."""
    for file in sorted(folder.rglob("*.safetensors")):
        check_weight_file(file, pickles=pickles)
    for file in sorted(folder.rglob("*.safetensors.index*.json")):
        _check_shards(file)
    if not pickles:
        _reject_pickles(folder)


def _suggest_folder(path: Path) -> str:
    """Return a hint that names the folder to pass instead of a folder without `model_index.json`."""
    if (path / "config.json").is_file():
        return "this folder contains a single model; pass the pipeline folder above it, which contains model_index.json"
    below = next((entry.name for entry in sorted(path.iterdir()) if (entry / "model_index.json").is_file()), None)
    return f"use {path / below}" if below else "pass a folder that was written by pipe.save_pretrained"


def check_index(index: Path, trusted: bool) -> None:
    """Raise `ModelError` if the pipeline's index file cannot be read or refers to untrusted code."""
    try:
        content = json.loads(index.read_text())
        components = dict(content)
    except (OSError, RecursionError, ValueError, TypeError) as error:
        raise ModelFileError(f"cannot read {index}: {error}", hint="copy or download the file again") from error
    name = components.get("_class_name")
    # Optimum for Intel Gaudi saves its own subclasses, such as GaudiStableDiffusionPipeline.
    if isinstance(name, str) and name.startswith("Gaudi"):
        raise ModelError(
            f"{index.parent} was saved by Optimum for Intel Gaudi: diffusers has no class {name}",
            hint=f'in {index.name}, change "_class_name" to "{name.removeprefix("Gaudi")}" and rename the schedulers '
            "in the same way; see the table in docs/from-optimum-habana.md",
        )
    if not trusted and has_custom_code(index):
        raise ModelError(
            f"{index.parent} contains custom code, which would run when the model is loaded",
            hint="review the code, then pass trust_remote_code=True",
        )


def has_custom_code(index: Path) -> bool:
    """Return whether a pipeline's index or the config of its blocks refers to Python files in the folder."""
    content = dict(json.loads(index.read_text()))
    entries = [entry for entry in content.values() if isinstance(entry, list)]
    # The name of the class is a list if it is [Python file, class], as for a component.
    is_custom = isinstance(content.get("_class_name"), list) or any(_is_code(index.parent, entry) for entry in entries)
    return is_custom or _has_custom_blocks(index.parent)


def _has_custom_blocks(folder: Path) -> bool:
    """Return whether a folder names a Python file for the blocks of its modular pipeline."""
    file = folder / "modular_config.json"
    try:
        content = json.loads(file.read_text()) if file.is_file() else {}
    except (OSError, ValueError) as error:
        raise ModelFileError(f"cannot read {file}: {error}", hint="copy or download the file again") from error
    return isinstance(content, dict) and bool(content.get("auto_map"))


def _check_shards(index: Path) -> None:
    """Raise `ModelFileError` if the index of sharded weights lists files that are missing or elsewhere."""
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        other = [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]
        if other:
            raise ValueError(f"{other[0]} is not a safetensors file in the same folder")
    except (OSError, RecursionError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ModelFileError(f"cannot read {index}: {error}", hint="copy or download the file again") from error
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise ModelFileError(
            f"{index.parent} lacks {', '.join(missing[:3])}{', …' * (len(missing) > 3)}: "
            f"{index.name} lists {len(names)} files, and {len(missing)} of them are missing",
            hint="copy or download the folder again",
        )


def _is_code(folder: Path, entry: list[Any]) -> bool:
    """Return whether a component's class is defined by a Python file in the model folder.

    For example, `["my_unet", "MyUNet"]` refers to `my_unet.py`.
    """
    library = entry[0] if entry else None
    if not isinstance(library, str):
        return False
    return any((folder / subfolder / f"{library}.py").is_file() for subfolder in ("", library, "unet", "transformer"))


def _reject_pickles(path: Path) -> None:
    """Raise `ModelError` if the folder of a component contains pickled weights but no safetensors file."""
    is_component = not any((path / name).is_file() for name in INDEXES)
    for folder in [path] if is_component else sorted(entry for entry in path.iterdir() if entry.is_dir()):
        names = [file.name for file in folder.iterdir()]
        # Checkpoints of a training run have optimizer.bin and scheduler.bin, which are never loaded.
        weights = [name for name in names if name.endswith(PICKLES) and not name.startswith(("optimizer", "scheduler"))]
        if weights and not any(name.endswith(".safetensors") for name in names):
            raise make_pickle_error(folder / weights[0])
