"""The files of a model on disk, looked at before anything is loaded: complete, readable, and free of code."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

from anyaccel.errors import ModelError

__all__ = ["check_model_folder", "check_safetensors", "is_single_file"]

_INDEXES = ("model_index.json", "modular_model_index.json")
_WEIGHTS = (".safetensors", ".ckpt", ".bin", ".pt", ".pth", ".gguf")
_PICKLES = (".bin", ".ckpt", ".pt", ".pth")
_LONGEST_HEADER = 100 * 2**20


def is_single_file(model: Any) -> bool:
    """Whether a model is named by one file of weights rather than by a folder or a hub id."""
    text = str(model)
    return text.endswith(_WEIGHTS) and (Path(text).is_file() or text.startswith(("http://", "https://")))


def check_model_folder(model: Any, *, pickles: bool, trusted: bool) -> None:
    """Raise if a local model cannot be loaded, or would run code; a hub id is left to the hub."""
    path = Path(str(model)).expanduser()
    if path.is_file():
        if path.suffix not in _WEIGHTS:
            raise ModelError(f"{model} is a file, and not one of weights", hint="give the folder of the pipeline")
        if path.suffix in _PICKLES and not pickles:
            raise _pickled(path)
        if path.suffix == ".safetensors":
            check_safetensors(path)
        return
    if not path.is_dir():
        if (
            str(model).startswith((".", "/", "~"))
            or str(model).count("/") > 1
            or (os.sep != "/" and os.sep in str(model))
        ):
            raise ModelError(f"there is no folder {model}", hint="is the path right?")
        return
    index = next((path / name for name in _INDEXES if (path / name).is_file()), None)
    if index is None:
        raise ModelError(f"{model} is no pipeline: it has no model_index.json", hint=_suggest(path))
    _check_index(index, trusted)
    for file in sorted(path.rglob("*.safetensors")):
        check_safetensors(file)
    if not pickles:
        _refuse_pickles(path)


def _suggest(path: Path) -> str:
    """A folder of one model, or one above a pipeline, is the usual slip."""
    if (path / "config.json").is_file():
        return "this is one model; give the folder above it, which has a model_index.json"
    below = next((entry.name for entry in sorted(path.iterdir()) if (entry / "model_index.json").is_file()), None)
    return f"take {path / below}" if below else "give a folder that save_pretrained of a pipeline wrote"


def _check_index(index: Path, trusted: bool) -> None:
    """The file that lists the components can be read, and names no code of its own."""
    try:
        content = json.loads(index.read_text())
        components = dict(content)
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"{index} cannot be read: {error}", hint="download it again") from error
    name = components.get("_class_name")
    if isinstance(name, str) and name.startswith("Gaudi"):
        raise ModelError(
            f"{index.parent} was saved by Optimum for Intel Gaudi, whose class {name} is not diffusers'",
            hint=f'write "{name.removeprefix("Gaudi")}" for "_class_name" in {index.name}, and the schedulers\' names '
            "likewise; docs/from-optimum-habana.md has the whole table",
        )
    if trusted:
        return
    custom = [part for part in components.values() if isinstance(part, list) and _is_code(index.parent, part)]
    if isinstance(name, list) or custom:
        raise ModelError(
            f"{index.parent} comes with code of its own, which loading it would run",
            hint="read that code, and pass trust_remote_code=True if you trust it",
        )


def _is_code(folder: Path, part: list[Any]) -> bool:
    """Whether a component's library is a Python file in the folder: `["my_unet", "MyUNet"]` beside my_unet.py."""
    library = part[0] if part else None
    if not isinstance(library, str):
        return False
    return any((folder / place / f"{library}.py").is_file() for place in ("", library, "unet", "transformer"))


def _refuse_pickles(path: Path) -> None:
    """Every component that has weights has them as safetensors."""
    for folder in sorted(entry for entry in path.iterdir() if entry.is_dir()):
        names = [file.name for file in folder.iterdir()]
        weights = [
            name for name in names if name.endswith(_PICKLES) and not name.startswith(("optimizer", "scheduler"))
        ]
        if weights and not any(name.endswith(".safetensors") for name in names):
            raise _pickled(folder / weights[0])


def _pickled(path: Path) -> ModelError:
    return ModelError(
        f"the weights in {path} are pickled, and loading a pickle can run any code",
        hint="get or convert them to safetensors, or pass use_safetensors=False if you trust where they come from",
    )


def check_safetensors(path: Path) -> None:
    """Raise if a file of weights is not whole: its header says how long it must be."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
            if not 0 <= length <= min(size, _LONGEST_HEADER):
                raise ValueError("its header cannot be read")
            header = json.loads(file.read(length))
    except ValueError as error:
        raise ModelError(f"{path} is no whole file of weights: {error}", hint="download it again") from error
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    needed = 8 + length + max(ends, default=0)
    if size < needed:
        raise ModelError(
            f"{path} is cut off: it has {size:,} bytes, and its header speaks of {needed:,}", hint="download it again"
        )
