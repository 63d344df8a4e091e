"""The folder from which clients add LoRA adapters at run time: they name a file, and never pass a path."""

from __future__ import annotations

import re
from pathlib import Path

from safetensors import SafetensorError, safe_open

from anyaccel.errors import UnknownLoraError, UsageError, nearest

__all__ = ["check_lora", "find_lora", "list_loras"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_SUFFIX = ".safetensors"


def list_loras(folder: Path) -> list[str]:
    """Return the names of the LoRA files in the folder: the file names without `.safetensors`."""
    return sorted(
        file.stem for file in folder.glob(f"*{_SUFFIX}") if _is_inside(file, folder) and _NAME.fullmatch(file.stem)
    )


def find_lora(folder: Path, name: str) -> Path:
    """Return the file of a LoRA; raise `UnknownLoraError` if the folder has none with this name."""
    # The name cannot contain a separator or start with a dot, and a link must not lead out of the folder.
    file = folder / f"{name}{_SUFFIX}"
    if not _NAME.fullmatch(name) or not _is_inside(file, folder):
        known = list_loras(folder)
        hint = nearest(name[:100], known) if known else "the folder of --lora-dir contains no .safetensors files"
        raise UnknownLoraError(f"unknown LoRA {name!r:.60}", hint=hint)
    return file


def check_lora(file: Path) -> None:
    """Raise `UsageError` if a file is not a safetensors file with the weights of a LoRA."""
    try:
        with safe_open(file, framework="numpy") as tensors:
            names = list(tensors.keys())
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{file.name} is not a valid safetensors file", hint="save the LoRA as safetensors") from error
    if not any("lora" in name.lower() for name in names):
        raise UsageError(f"{file.name} contains no LoRA weights", hint="pass the file of a LoRA, not of a model")


def _is_inside(file: Path, folder: Path) -> bool:
    return file.is_file() and file.resolve().parent == folder.resolve()
