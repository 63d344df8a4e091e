"""Quantized layers in the copy of a model on `meta`, with the memory that the kernels of their library need."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from anyaccel.forward_overrides import Slot, set_override
from anyaccel.quantized_weights.dequantized_linear import DequantizedLinear
from anyaccel.quantized_weights.library_layers import read_library
from anyaccel.quantized_weights.stored_tensors import list_stored_tensors
from anyaccel.upstream.diffusers_internals import read_layerwise_dtype

__all__ = ["list_quantized", "trace_as_quantized"]


def list_quantized(model: torch.nn.Module) -> dict[int, list[torch.Tensor]]:
    """Return the tensors of the layers that a library has quantized, by the position of the layer in the model."""
    return {
        position: list_stored_tensors(layer)
        for position, layer in enumerate(model.modules())
        if read_library(layer) and not isinstance(layer, DequantizedLinear) and _is_of_library(layer)
    }


def _is_of_library(layer: Any) -> bool:
    """Return whether a library has quantized the layer: a plain weight in a float8 dtype is not of a library."""
    return type(layer) is not torch.nn.Linear or type(layer.weight) is not torch.nn.Parameter


def trace_as_quantized(
    original: torch.nn.Module, copied: torch.nn.Module, quantized: Mapping[int, list[torch.Tensor]]
) -> None:
    """Let the layers of a copy on `meta` allocate what those of the original model do.

    Libraries dequantize the weight of one layer at a time to the dtype of its input, and layerwise casting of diffusers
    casts the weights of one layer at a time. The shapes of a library's own operations are not known on `meta`.
    """
    for position, (before, layer) in enumerate(zip(original.modules(), copied.modules(), strict=True)):
        if position in quantized:
            _replace_weight(layer, quantized[position])
        dtype = read_layerwise_dtype(before)
        if dtype is not None and position not in quantized:
            set_override(layer, Slot.WEIGHTS, functools.partial(_run_with_cast_weights, layer, dtype))


def _replace_weight(layer: Any, tensors: list[torch.Tensor]) -> None:
    del layer.weight
    for number, tensor in enumerate(tensors):
        meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        layer.register_parameter(f"stored_{number}", torch.nn.Parameter(meta, requires_grad=False))
    # Models read its dtype. Not a parameter: it has no memory of its own.
    vars(layer)["weight"] = torch.empty(0, dtype=tensors[0].dtype, device="meta")
    set_override(layer, Slot.WEIGHTS, functools.partial(_run_dequantized, layer))


def _run_dequantized(layer: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> torch.Tensor:
    tensor = args[0] if args else next(iter(kwargs.values()))
    weight = tensor.new_empty((layer.out_features, layer.in_features))
    bias = None if layer.bias is None else layer.bias.to(tensor.dtype)
    return torch.nn.functional.linear(tensor, weight, bias)


def _run_with_cast_weights(layer: Any, dtype: torch.dtype, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    stored = {weight: weight.data for weight in layer.parameters()}
    for weight in stored:
        weight.data = weight.data.to(dtype)
    try:
        return call(*args, **kwargs)
    finally:
        for weight, data in stored.items():
            weight.data = data
