"""Reading of tensors with 8-bit weights from files, with the scales that may be in other files of the same model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from anyaccel.errors import ModelFileError
from anyaccel.quantized_weights.scaled_files import find_scaled_weight, has_scales, mark_scaled_weights
from anyaccel.runtime.weight_files.safetensors_header import read_safetensors_header

__all__ = ["has_8bit_weights", "has_quantization_config", "mark_tensors", "read_tensors"]

_FLOAT8 = ("F8_E4M3", "F8_E5M2")


def read_tensors(file: Path) -> dict[str, Any]:
    """Return the tensors of a safetensors file, with 8-bit weights as `ScaledWeight`."""
    with safe_open(file, "pt") as opened:
        tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 - not a dict
    marked: dict[str, Any] = mark_tensors(tensors, file)
    return marked


def mark_tensors(tensors: Any, file: Path) -> Any:
    """Return the tensors that were read from a file, with 8-bit weights as `ScaledWeight`."""
    is_plain = not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values())
    if file.suffix == ".gguf" or is_plain:
        return tensors
    metadata: dict[str, str] = {}
    if file.suffix == ".safetensors":
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata() or {}
        tensors = _exchange_scales(tensors, file)
    return mark_scaled_weights(tensors, str(file), metadata)


def _exchange_scales(tensors: Mapping[str, torch.Tensor], file: Path) -> Mapping[str, torch.Tensor]:
    """Return the tensors of a shard with the scales of its weights that are in other shards, and without the others."""
    index = _read_shard_index(file)
    wanted: dict[str, list[str]] = {}
    for name in index:
        if find_scaled_weight(name) in tensors and name not in tensors:
            wanted.setdefault(index[name], []).append(name)
    result = {
        name: tensor for name, tensor in tensors.items() if index.get(find_scaled_weight(name), file.name) == file.name
    }
    for shard, names in wanted.items():
        with safe_open(file.parent / shard, "pt") as opened:
            result |= {name: opened.get_tensor(name) for name in names}
    return result


def _read_shard_index(file: Path) -> dict[str, str]:
    """Return the shard of each tensor of the model of which a file is a shard; nothing if the file has all tensors."""
    for index in file.parent.glob("*.safetensors.index*.json"):
        shards = dict(json.loads(index.read_text())["weight_map"])
        if file.name in shards.values():
            return shards
    return {}


def has_quantization_config(folder: Path) -> bool:
    """Return whether the config of a model names a library that has quantized its weights."""
    file = folder / "config.json"
    try:
        content = json.loads(file.read_text()) if file.is_file() else {}
        if not isinstance(content, dict):
            raise ValueError("the content is not a JSON object")
    except (OSError, RecursionError, ValueError) as error:
        raise ModelFileError(f"cannot read {file}: {error}", hint="copy or download the file again") from error
    return bool(content.get("quantization_config"))


def has_8bit_weights(files: list[Path]) -> bool:
    """Return whether files have 8-bit weights, or weights with scales."""
    for file in files:
        header = read_safetensors_header(file)[0] if file.suffix == ".safetensors" else {}
        if has_scales(header) or any(_is_code(name, entry.get("dtype")) for name, entry in header.items()):
            return True
    return False


def _is_code(name: str, dtype: str | None) -> bool:
    return dtype in _FLOAT8 or (dtype == "I8" and name.endswith(".weight"))
