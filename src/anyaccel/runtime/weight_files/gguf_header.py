"""The header of a GGUF file: the architecture of the model, and the types and positions of its tensors."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["GgufHeader", "read_gguf_header"]

# https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. `gguf.GGUFReader` maps all tensors before it reports a
# problem, and reads an unknown type or the end of the file as an error of NumPy.
_SCALARS = ("<B", "<b", "<H", "<h", "<I", "<i", "<f", "<?", "", "", "<Q", "<q", "<d")
_STRING, _ARRAY = 8, 9
_MAX_STRING_BYTES = 2**26
_MAX_COUNT = 2**24


@dataclass(frozen=True)
class GgufHeader:
    """What the header of a GGUF file says."""

    architecture: str
    """`flux`, or the name of a language model, such as `llama`."""
    tensors: tuple[tuple[str, int, int, int], ...]
    """The name, the type, the number of weights and the position after `start` of each tensor."""
    start: int
    """The position of the first tensor."""


def read_gguf_header(path: Path) -> GgufHeader:
    """Return the header of a file; raise `ValueError` if it is damaged."""
    with path.open("rb") as file:
        magic, version, tensor_count, field_count = _unpack(file, "<4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"version {version} of the format is not supported")
        if max(tensor_count, field_count) > _MAX_COUNT:
            raise ValueError("the header is damaged")
        fields = {}
        for _ in range(field_count):
            name = _read_string(file)
            fields[name] = _read_value(file, *_unpack(file, "<I"))
        tensors = []
        for _ in range(tensor_count):
            name = _read_string(file)
            (dimensions,) = _unpack(file, "<I")
            if dimensions > 8:
                raise ValueError(f"tensor {name} has {dimensions} dimensions")
            shape = _unpack(file, f"<{dimensions}Q")
            kind, offset = _unpack(file, "<IQ")
            tensors.append((name, kind, math.prod(shape), offset))
        alignment = fields.get("general.alignment") or 32
        if not isinstance(alignment, int) or alignment < 0:
            raise ValueError(f"the alignment is {alignment}")
        start = -(-file.tell() // alignment) * alignment
    return GgufHeader(str(fields.get("general.architecture") or ""), tuple(tensors), start)


def _unpack(file: BinaryIO, form: str) -> tuple[Any, ...]:
    size = struct.calcsize(form)
    data = file.read(size)
    if len(data) < size:
        raise ValueError("the file ends in its header")
    return struct.unpack(form, data)


def _read_string(file: BinaryIO) -> str:
    (length,) = _unpack(file, "<Q")
    if length > _MAX_STRING_BYTES:
        raise ValueError("the header is damaged")
    return bytes(_unpack(file, f"<{length}s")[0]).decode(errors="replace")


def _read_value(file: BinaryIO, kind: int) -> Any:
    """Return a string or a number, and None for an array, such as the vocabulary of a language model."""
    if kind == _STRING:
        return _read_string(file)
    if kind != _ARRAY:
        return _unpack(file, _find_scalar(kind))[0]
    item, count = _unpack(file, "<IQ")
    if count > _MAX_COUNT:
        raise ValueError("the header is damaged")
    if item in (_STRING, _ARRAY):
        for _ in range(count):
            _read_value(file, item)
    else:
        file.seek(count * struct.calcsize(_find_scalar(item)), 1)
    return None


def _find_scalar(kind: int) -> str:
    if kind >= len(_SCALARS) or not _SCALARS[kind]:
        raise ValueError(f"unknown type {kind} of a value in the header")
    return _SCALARS[kind]
