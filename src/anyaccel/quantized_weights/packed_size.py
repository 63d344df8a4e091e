"""The number of a model's parameters and the size of those that are quantized."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from anyaccel.quantized_weights.library_layers import read_library
from anyaccel.quantized_weights.stored_tensors import count_stored_bytes

__all__ = ["PackedSize", "count_packed"]


class PackedSize(NamedTuple):
    """Numbers of parameters, before quantization."""

    plain: int
    quantized: int
    quantized_bytes: int


def count_packed(model: torch.nn.Module) -> PackedSize:
    """Count the parameters of a model that are not quantized, and those that are."""
    quantized = quantized_bytes = 0
    plain = {id(parameter): parameter for parameter in model.parameters()}
    for layer in model.modules():
        if _is_packed(layer):
            quantized += _count_weights(layer)
            quantized_bytes += count_stored_bytes(layer)
            for name, parameter in layer.named_parameters(recurse=False):
                if name != "bias":
                    plain.pop(id(parameter), None)
    for key, parameter in list(plain.items()):
        if parameter.is_floating_point() and parameter.dtype.itemsize == 1:  # layers with casting to float8
            quantized += parameter.numel()
            quantized_bytes += parameter.numel()
            del plain[key]
    return PackedSize(sum(parameter.numel() for parameter in plain.values()), quantized, quantized_bytes)


def _count_weights(layer: Any) -> int:
    return int(layer.in_features * layer.out_features)


def _is_packed(layer: Any) -> bool:
    """Return whether a layer is quantized, with tensors that are not just a smaller dtype of the weight."""
    library = read_library(layer)
    return bool(library) and not library.startswith("float8")
