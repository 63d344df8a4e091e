"""Sizes of the weights in the files of a pipeline, read from the headers of the files."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from anyaccel.planning.loading_memory import WeightBytes
from anyaccel.runtime.weight_files.safetensors_header import read_safetensors_header

__all__ = ["find_weight_files", "read_weight_bytes", "read_weights"]

# `model.fp16.safetensors`, `model.fp16-00001-of-00002.safetensors`; plain names have no second suffix.
_VARIANT = re.compile(r"^[^.]+\.(?P<variant>[^.]+?)(-\d{5}-of-\d{5})?$")
_NAMES = tuple(f"{name}{end}" for name in ("model", "diffusion_pytorch_model") for end in ".-")
_FLOATING = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def find_weight_files(folder: Path, variant: str | None = None) -> list[Path]:
    """Return the safetensors files that diffusers loads from the folder of a component."""
    files = sorted(folder.glob("*.safetensors"))
    # Other files are not loaded, such as one that the user has saved next to them.
    files = [file for file in files if file.name.startswith(_NAMES)] or files
    chosen = [file for file in files if _read_variant(file.stem) == variant] if variant else []
    chosen = chosen or [file for file in files if _read_variant(file.stem) is None]
    # A folder may have the same weights in one file and in shards; the index names the shards.
    indexes = [
        file for file in folder.glob("*.safetensors.index*.json") if _is_index(file, variant if chosen else None)
    ]
    shards = set(json.loads(indexes[0].read_text())["weight_map"].values()) if len(indexes) == 1 else set()
    return [file for file in chosen if file.name in shards] or chosen


def _read_variant(stem: str) -> str | None:
    match = _VARIANT.match(stem)
    return match["variant"] if match else None


def _is_index(file: Path, variant: str | None) -> bool:
    # `model.safetensors.index.json`, `model.safetensors.index.fp16.json`
    return file.name.endswith(f".index.{variant}.json" if variant else ".index.json")


def read_weight_bytes(
    folders: Mapping[str, Path],
    dtype: torch.dtype | Mapping[str, torch.dtype] | None,
    variant: str | None = None,
) -> dict[str, int]:
    """Return the bytes of each component's weights after loading in a dtype; without dtype, as they are in the files.

    `folders` are those of the components by name. Components without safetensors files are left out.
    """
    return {name: size.total for name, size in read_weights(folders, dtype, variant).items()}


def read_weights(
    folders: Mapping[str, Path],
    dtype: torch.dtype | Mapping[str, torch.dtype] | None,
    variant: str | None = None,
) -> dict[str, WeightBytes]:
    """Return the sizes of each component's weights, as `read_weight_bytes`, and which of them are cast."""
    sizes = {}
    for name, folder in folders.items():
        wanted = dtype.get(name, dtype.get("default", torch.float32)) if isinstance(dtype, Mapping) else dtype
        files = find_weight_files(folder, variant) if folder.is_dir() else []
        if files:
            parts = [_read_file(file, wanted) for file in files]
            sizes[name] = WeightBytes(sum(part.mapped for part in parts), sum(part.cast for part in parts))
    return sizes


def _read_file(file: Path, dtype: torch.dtype | None) -> WeightBytes:
    header: dict[str, Any] = read_safetensors_header(file)[0]
    mapped = cast = 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if dtype is None or _FLOATING.get(entry["dtype"], dtype) == dtype:
            begin, end = entry["data_offsets"]
            mapped += end - begin
        else:
            cast += math.prod(entry["shape"]) * dtype.itemsize
    return WeightBytes(mapped, cast)
