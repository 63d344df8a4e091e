"""Checks on model files before loading: they must be complete, readable and free of executable code."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

from anyaccel.errors import ModelError, ModelFileError

__all__ = ["check_model_folder", "check_safetensors", "is_single_file"]

_INDEXES = ("model_index.json", "modular_model_index.json")
_WEIGHTS = (".safetensors", ".ckpt", ".bin", ".pt", ".pth", ".gguf")
_PICKLES = (".bin", ".ckpt", ".pt", ".pth")
# The format allows headers of about 100 MB.
_MAX_HEADER_BYTES = 100 * 2**20


def is_single_file(model: Any) -> bool:
    """Return whether a model is a weights file (path or URL) rather than a folder or a Hub ID."""
    text = str(model)
    return text.endswith(_WEIGHTS) and (Path(text).is_file() or text.startswith(("http://", "https://")))


def check_model_folder(model: Any, *, pickles: bool, trusted: bool) -> None:
    """Raise `ModelError` if a local model cannot be loaded or would run code; do not check a Hub ID.

    `pickles` allows pickled weights, and `trusted` allows custom code.
    """
    path = Path(str(model)).expanduser()
    if path.is_file():
        if path.suffix not in _WEIGHTS:
            raise ModelError(
                f"{model} is not a single-file checkpoint: its suffix is not one of {', '.join(_WEIGHTS)}",
                hint="pass the folder of the pipeline, which contains model_index.json",
            )
        if path.suffix in _PICKLES and not pickles:
            raise _make_pickle_error(path)
        if path.suffix == ".safetensors":
            check_safetensors(path)
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
    index = next((path / name for name in _INDEXES if (path / name).is_file()), None)
    if index is None:
        raise ModelFileError(f"{model} is not a pipeline: it has no model_index.json", hint=_suggest_folder(path))
    _check_index(index, trusted)
    for file in sorted(path.rglob("*.safetensors")):
        check_safetensors(file)
    if not pickles:
        _reject_pickles(path)


def _suggest_folder(path: Path) -> str:
    """Return a hint that names the folder to pass instead of a folder without `model_index.json`."""
    if (path / "config.json").is_file():
        return "this folder contains a single model; pass the pipeline folder above it, which contains model_index.json"
    below = next((entry.name for entry in sorted(path.iterdir()) if (entry / "model_index.json").is_file()), None)
    return f"use {path / below}" if below else "pass a folder that was written by pipe.save_pretrained"


def _check_index(index: Path, trusted: bool) -> None:
    """Raise `ModelError` if the pipeline's index file cannot be read or refers to untrusted code."""
    try:
        content = json.loads(index.read_text())
        components = dict(content)
    except (OSError, ValueError, TypeError) as error:
        raise ModelFileError(f"cannot read {index}: {error}", hint="copy or download the file again") from error
    name = components.get("_class_name")
    # Optimum for Intel Gaudi saves its own subclasses, such as GaudiStableDiffusionPipeline.
    if isinstance(name, str) and name.startswith("Gaudi"):
        raise ModelError(
            f"{index.parent} was saved by Optimum for Intel Gaudi: diffusers has no class {name}",
            hint=f'in {index.name}, change "_class_name" to "{name.removeprefix("Gaudi")}" and rename the schedulers '
            "in the same way; see the table in docs/from-optimum-habana.md",
        )
    if trusted:
        return
    custom = [entry for entry in components.values() if isinstance(entry, list) and _is_code(index.parent, entry)]
    if isinstance(name, list) or custom:  # a list is [Python file, class], as for a component
        raise ModelError(
            f"{index.parent} contains custom code, which would run when the model is loaded",
            hint="review the code, then pass trust_remote_code=True",
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
    """Raise `ModelError` if a component folder contains pickled weights but no safetensors file."""
    for folder in sorted(entry for entry in path.iterdir() if entry.is_dir()):
        names = [file.name for file in folder.iterdir()]
        # Checkpoints of a training run have optimizer.bin and scheduler.bin, which are never loaded.
        weights = [
            name for name in names if name.endswith(_PICKLES) and not name.startswith(("optimizer", "scheduler"))
        ]
        if weights and not any(name.endswith(".safetensors") for name in names):
            raise _make_pickle_error(folder / weights[0])


def _make_pickle_error(path: Path) -> ModelError:
    return ModelError(
        f"the weights in {path} are pickled, and loading a pickle can run arbitrary code",
        hint="convert them to safetensors, or pass use_safetensors=False if you trust the source",
    )


def check_safetensors(path: Path) -> None:
    """Check a safetensors file's size against its header; raise if the file is truncated or corrupted."""
    # The file starts with the header's length (8 bytes, little endian) and the header (JSON):
    # https://huggingface.co/docs/safetensors/index#format
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
            if not 0 <= length <= min(size, _MAX_HEADER_BYTES):
                raise ValueError("the header cannot be read")
            header = json.loads(file.read(length))
    except ValueError as error:
        hint = "copy or download the file again"
        raise ModelFileError(f"{path} is not a valid safetensors file: {error}", hint=hint) from error
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    needed = 8 + length + max(ends, default=0)
    if size < needed:
        raise ModelFileError(
            f"{path} is truncated: it has {size:,} bytes, but its header requires {needed:,}",
            hint="copy or download the file again",
        )
