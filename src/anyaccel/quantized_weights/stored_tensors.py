"""The tensors in which the layers of a quantization library store a weight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from anyaccel.quantized_weights.dequantized_linear import DequantizedLinear

__all__ = ["count_stored_bytes", "list_stored_tensors"]


def list_stored_tensors(layer: Any) -> list[torch.Tensor]:
    """Return the tensors of a quantized layer's weight: codes, scales and tables, without the bias."""
    holders = [layer.weight, *(value for name, value in vars(layer).items() if not name.startswith("_"))]
    found: dict[int, torch.Tensor] = {}
    for tensor in _list_tensors(holders, set()):
        # bitsandbytes has several tensor objects for the same codes.
        address = tensor.untyped_storage().data_ptr() or id(tensor)
        found.setdefault(address, tensor)
    return list(found.values())


def count_stored_bytes(layer: Any) -> int:
    """Return the size of a quantized layer's weight."""
    if isinstance(layer, DequantizedLinear):  # reading its `weight` would dequantize it
        return layer.count_bytes()
    return sum(tensor.numel() * tensor.element_size() for tensor in list_stored_tensors(layer))


def _list_tensors(values: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Yield the plain tensors in values: in tensor subclasses, and in the state objects of bitsandbytes."""
    for value in values:
        if value is None or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            names = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else []
            if names:
                yield from _list_tensors([getattr(value, name) for name in names], seen)
            else:
                yield value.detach()
                yield from _list_tensors(vars(value).values(), seen)
        elif type(value).__module__.startswith("bitsandbytes."):
            yield from _list_tensors(vars(value).values(), seen)
