"""Weights in memory-mapped files.

Mapped weights are ordinary CPU tensors. The operating system reads them from disk on demand and can
drop them from memory at any time. The mapping is private: a changed page is copied to memory, and
the file keeps its content.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import IO, Any

import torch

from anyaccel.backends.device_type_checks import is_host
from anyaccel.storage.temporary_file import open_file_to_map

__all__ = ["is_mapped", "map_weights"]

_ALIGNMENT_BYTES = 64  # that of torch's own CPU tensors

_MAPPED: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()


def is_mapped(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is memory-mapped by `map_weights`."""
    return type(tensor.data) is torch.Tensor and is_host(tensor.device) and tensor.untyped_storage() in _MAPPED


def map_weights(model: torch.nn.Module) -> None:
    """Write a model's parameters to a temporary file and replace their data with mapped tensors.

    The parameters stay the same objects. Parameters that are mapped already, are not on the CPU, or are
    quantized, and buffers, stay as they are.
    """
    with torch.inference_mode(False), torch.no_grad():
        parameters = [parameter for parameter in model.parameters() if _can_be_mapped(parameter)]
        if parameters:
            for parameter, mapped in zip(parameters, _write_and_map(parameters), strict=True):
                parameter.data = mapped


def _can_be_mapped(parameter: torch.Tensor) -> bool:
    is_plain = type(parameter.data) is torch.Tensor and parameter.layout is torch.strided
    return is_plain and is_host(parameter.device) and parameter.numel() > 0 and not is_mapped(parameter)


def _write_and_map(parameters: list[torch.nn.Parameter]) -> Iterable[torch.Tensor]:
    """Return mapped copies of parameters; parameters that share their data share the copy."""
    tensors: dict[tuple[object, ...], torch.Tensor] = {}
    keys = []
    for parameter in parameters:
        value = parameter.detach()
        keys.append((value.data_ptr(), value.shape, value.stride(), value.dtype))
        # Other strides, such as those of channels-last weights, are kept; a view with gaps is made contiguous.
        is_dense = torch.empty_like(value, device="meta").stride() == value.stride()
        tensors.setdefault(keys[-1], value if is_dense else value.contiguous())
    with open_file_to_map() as file:
        starts = {key: _write(file, value) for key, value in tensors.items()}
        file.flush()
        storage: Any = torch.UntypedStorage.from_file(file.name, False, file.tell())
    mapped = {key: _make_view(storage, starts[key], value) for key, value in tensors.items()}
    return [mapped[key] for key in keys]


def _write(file: IO[bytes], value: torch.Tensor) -> int:
    """Append a dense tensor to a file and return its position."""
    file.write(bytes(-file.tell() % _ALIGNMENT_BYTES))
    start = file.tell()
    flat = value.as_strided((value.numel(),), (1,))
    data: Any = flat.view(torch.uint8).numpy()  # a buffer; numpy.ndarray is not declared as one before Python 3.12
    file.write(data)
    return start


def _make_view(storage: torch.UntypedStorage, start: int, value: torch.Tensor) -> torch.Tensor:
    # A slice is a storage of its own, so that saving or copying one weight does not include the others.
    part: torch.UntypedStorage = storage[start : start + value.nbytes]
    mapped = torch.empty(0, dtype=value.dtype, device="cpu").set_(part, 0, value.shape, value.stride())
    _MAPPED.add(mapped.untyped_storage())
    return mapped
