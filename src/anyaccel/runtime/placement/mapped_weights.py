"""Weights in memory-mapped files.

Mapped weights are ordinary CPU tensors. The operating system reads them from disk on demand and can
drop them from memory at any time. The mapping is private: a changed page is copied to memory, and
the file keeps its content.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import IO, Any

import torch

from anyaccel.backends.device_type_checks import is_host
from anyaccel.storage.temporary_file import open_file_to_map

__all__ = ["is_mapped", "map_weights"]

_ALIGNMENT_BYTES = 64  # that of torch's own CPU tensors
_FILE_BYTES = 2**30  # the weights in memory are freed when their file is complete

_MAPPED: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()


def is_mapped(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is memory-mapped by `map_weights`."""
    is_plain = type(tensor.data) is torch.Tensor and tensor.layout is torch.strided
    return is_plain and is_host(tensor.device) and tensor.untyped_storage() in _MAPPED


def map_weights(models: Iterable[torch.nn.Module]) -> None:
    """Write the parameters of models to a temporary file and replace their data with mapped tensors.

    The parameters stay the same objects, and those that share memory still do. Buffers stay as they are, and parameters
    that are mapped already, are not on the CPU, are quantized, or share memory with a buffer.
    """
    models = list(models)
    tensors = dict.fromkeys(chain.from_iterable((*model.parameters(), *model.buffers()) for model in models))
    with torch.inference_mode(False), torch.no_grad():
        blocks = _group_by_memory([tensor for tensor in tensors if _can_be_mapped(tensor)])
        blocks = [block for block in blocks if all(isinstance(tensor, torch.nn.Parameter) for tensor in block.values)]
        while blocks:
            _map_blocks(blocks)


def _map_blocks(blocks: list[_Block]) -> None:
    """Remove blocks from the end of a list and map them from a file of `_FILE_BYTES` or a little more."""
    starts: list[tuple[_Block, int]] = []
    with open_file_to_map() as file:
        while blocks and file.tell() < _FILE_BYTES:
            block = blocks.pop()
            starts.append((block, _write(file, block)))
        file.flush()
        storage: Any = torch.UntypedStorage.from_file(file.name, False, file.tell())
    for block, start in starts:
        # A slice is a storage of its own, so that saving or copying one weight does not include the others.
        part: torch.UntypedStorage = storage[start : start + block.end - block.start]
        for parameter, value in block.values.items():
            offset = (value.data_ptr() - block.start) // value.itemsize
            mapped = torch.empty(0, dtype=value.dtype, device="cpu")
            parameter.data = mapped.set_(part, offset, value.shape, value.stride())
        _MAPPED.add(part)


def _can_be_mapped(parameter: torch.Tensor) -> bool:
    is_plain = type(parameter.data) is torch.Tensor and parameter.layout is torch.strided
    return is_plain and is_host(parameter.device) and parameter.numel() > 0 and not is_mapped(parameter)


@dataclass
class _Block:
    """Memory that one or more parameters use."""

    start: int
    end: int
    """The address after the last byte."""
    values: dict[torch.Tensor, torch.Tensor]
    """The data of each parameter or buffer."""


def _group_by_memory(parameters: list[torch.Tensor]) -> list[_Block]:
    """Return one block for each parameter or buffer, or for several of them that overlap."""
    blocks: list[_Block] = []
    for parameter in sorted(parameters, key=torch.Tensor.data_ptr):
        value = parameter.detach()
        start, end = value.data_ptr(), value.data_ptr() + _count_spanned_bytes(value)
        if not blocks or start >= blocks[-1].end:
            blocks.append(_Block(start, end, {}))
        blocks[-1].end = max(blocks[-1].end, end)
        blocks[-1].values[parameter] = value
    return [_copy_if_sparse(block) for block in blocks if _is_aligned(block)]


def _count_spanned_bytes(value: torch.Tensor) -> int:
    """Return the number of bytes from the first to the last element."""
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return (last + 1) * value.itemsize


def _is_aligned(block: _Block) -> bool:
    return all((value.data_ptr() - block.start) % value.itemsize == 0 for value in block.values.values())


def _copy_if_sparse(block: _Block) -> _Block:
    """Make a parameter contiguous that is a view with gaps, such as a column of a larger matrix."""
    ((parameter, value),) = block.values.items() if len(block.values) == 1 else ((None, None),)
    if parameter is None or value is None or block.end - block.start <= value.nbytes:
        return block
    value = value.contiguous()
    return _Block(value.data_ptr(), value.data_ptr() + value.nbytes, {parameter: value})


def _write(file: IO[bytes], block: _Block) -> int:
    """Append the content of a block to a file and return its position."""
    file.write(bytes(-file.tell() % _ALIGNMENT_BYTES))
    start = file.tell()
    data: Any = (ctypes.c_char * (block.end - block.start)).from_address(block.start)
    file.write(data)
    return start
