"""The header of a safetensors file: names, dtypes, shapes and positions of its tensors."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from anyaccel.errors import ModelFileError

__all__ = ["check_safetensors", "read_safetensors_header"]

# The format allows headers of about 100 MB.
_MAX_HEADER_BYTES = 100 * 2**20
# https://github.com/huggingface/safetensors/blob/main/safetensors/src/tensor.rs, in bits.
_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E5M2FNUZ", "F8_E4M3FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
_AGAIN = "copy or download the file again"


def read_safetensors_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header and the position of the first tensor; raise `ModelFileError` if it cannot be read."""
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
        if not isinstance(header, dict):
            raise ValueError("the header is not a JSON object")
    except (RecursionError, ValueError) as error:
        raise _make_file_error(path, str(error)) from error
    return header, 8 + length


def check_safetensors(path: Path) -> None:
    """Check a safetensors file's size against its header; raise if the file is truncated or corrupted."""
    header, start = read_safetensors_header(path)
    spans = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            shape, (begin, end) = entry["shape"], entry["data_offsets"]
            bits = math.prod(map(int, shape)) * _BITS[entry["dtype"]]
            has_wrong_size = begin < 0 or (end - begin) * 8 != bits
        except KeyError as error:
            what = (
                f"unknown dtype {entry['dtype']}" if entry.get("dtype") in error.args else f"no {error} in the header"
            )
            raise _make_error(path, name, what) from error
        except (OverflowError, TypeError, ValueError) as error:
            raise _make_error(path, name, str(error)) from error
        if has_wrong_size:
            raise _make_error(path, name, f"{end - begin} bytes for the shape {shape} of dtype {entry['dtype']}")
        spans.append((begin, end, name))
    _check_spans(path, sorted(spans), start)
    try:
        with safe_open(path, "np"):  # accepts only what the format allows, such as no offsets with a fraction
            pass
    except SafetensorError as error:
        raise _make_file_error(path, str(error)) from error


def _check_spans(path: Path, spans: list[tuple[int, int, str]], start: int) -> None:
    """Raise `ModelFileError` if tensors overlap or leave gaps, or if the file does not end with the last one."""
    position = 0
    for begin, end, name in spans:
        if begin != position:
            problem = "overlaps another tensor" if begin < position else "leaves a gap before it"
            raise _make_error(path, name, problem)
        position = end
    size, needed = path.stat().st_size, start + position
    if size < needed:
        raise ModelFileError(
            f"{path} is truncated: it has {size:,} bytes, but its header requires {needed:,}", hint=_AGAIN
        )
    if size > needed:
        raise ModelFileError(
            f"{path} is damaged: it has {size:,} bytes, but its header describes {needed:,}", hint=_AGAIN
        )


def _make_error(path: Path, name: str, problem: str) -> ModelFileError:
    return _make_file_error(path, f"tensor {name}: {problem}")


def _make_file_error(path: Path, problem: str) -> ModelFileError:
    return ModelFileError(f"{path} is not a valid safetensors file: {problem}", hint=_AGAIN)
