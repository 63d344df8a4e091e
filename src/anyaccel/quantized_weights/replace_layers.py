"""Conversion of a model's quantized layers into layers that run on a device without kernels for their format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from anyaccel.quantized_weights.dequantized_linear import DequantizedLinear
from anyaccel.quantized_weights.formats import FLOAT8, Blocks
from anyaccel.quantized_weights.library_layers import read_library, read_weight
from anyaccel.upstream.diffusers_internals import stop_layerwise_casting

__all__ = ["ReplacedQuantizer", "list_formats", "replace_quantized_layers", "set_replaced_quantizer"]

# Flags of diffusers and transformers for quantized models, which restrict `to`. A `DequantizedLinear` allows any.
_FLAGS = ("is_loaded_in_4bit", "is_loaded_in_8bit", "quantization_method", "is_quantized")


@torch.no_grad()
def replace_quantized_layers(model: torch.nn.Module, is_native: Callable[[str], bool]) -> None:
    """Convert the quantized layers of a model whose library is not native on the device.

    `is_native` takes the name of a library, or of a dtype for weights that are plain float8 tensors.
    """
    converted: dict[torch.nn.Module, torch.nn.Module] = {}
    for layer in list(model.modules()):
        if isinstance(layer, DequantizedLinear):
            _choose_float8_reader(layer, is_native)
            continue
        library = read_library(layer)
        new = _convert(layer) if library and not is_native(library) else None
        if new is not None:
            converted[layer] = new
    for parent in list(model.modules()):
        for name, layer in parent.named_children():
            if converted.get(layer, layer) is not layer:
                setattr(parent, name, converted[layer])
    _cast_other_layers(model, is_native)
    if converted:
        set_replaced_quantizer(model)


def set_replaced_quantizer(model: torch.nn.Module) -> None:
    """Make diffusers and transformers treat a model as one whose layers were replaced, if it has such layers."""
    for name in (*_FLAGS, "hf_quantizer"):
        vars(model).pop(name, None)
    if list_formats(model):
        vars(model)["hf_quantizer"] = ReplacedQuantizer(model)


def _choose_float8_reader(layer: DequantizedLinear, is_native: Callable[[str], bool]) -> None:
    """Let a layer with float8 codes use the dtype if the device has it, and its table of values otherwise."""
    dtype = next((dtype for dtype, name in FLOAT8.items() if name == layer.format.name), None)
    if dtype is not None and isinstance(layer.format, Blocks):
        layer.format = replace(layer.format, native=dtype if is_native(layer.format.name) else None)


class ReplacedQuantizer:
    """Takes the place of the quantizer of a model. diffusers and transformers then refuse to save it."""

    is_trainable = False

    def __init__(self, model: torch.nn.Module) -> None:
        formats = " and ".join(list_formats(model))
        self.quantization_config = SimpleNamespace(quant_method=f"{formats} weights, which the device dequantizes,")

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """Return False: the file would not have the format of the library."""
        return False

    def dequantize(self, model: torch.nn.Module, dtype: torch.dtype | None = None) -> torch.nn.Module:
        """Replace the layers by plain linear layers, as `model.dequantize()` does in diffusers and transformers."""
        for parent in list(model.modules()):
            for name, layer in parent.named_children():
                if isinstance(layer, DequantizedLinear):
                    setattr(parent, name, layer.to_linear(dtype))
        del vars(model)["hf_quantizer"]
        return model


def _convert(layer: torch.nn.Module) -> torch.nn.Module | None:
    """Return a quantized linear layer as a `DequantizedLinear`, or None if it is not quantized yet."""
    found = read_weight(layer)
    if found is None:
        return None
    dtype = stop_layerwise_casting(layer) or _find_compute_dtype(layer)
    new = DequantizedLinear.convert(layer, *found, dtype)
    if new.bias is not None and new.bias.dtype.itemsize == 1:
        new.bias = torch.nn.Parameter(new.bias.to(dtype), requires_grad=False)
    return new


def _cast_other_layers(model: torch.nn.Module, is_native: Callable[[str], bool]) -> None:
    """Cast convolutions, embeddings and norms whose weights are in a float8 dtype that the device lacks."""
    for layer in model.modules():
        dtypes = {weight.dtype for weight in layer.parameters(recurse=False) if weight.is_floating_point()}
        if any(dtype.itemsize == 1 and not is_native(str(dtype).removeprefix("torch.")) for dtype in dtypes):
            layer.to(stop_layerwise_casting(layer) or torch.float32)


def _find_compute_dtype(layer: Any) -> torch.dtype:
    dtype = getattr(layer, "compute_dtype", None) or layer.weight.dtype
    bias = layer.bias
    if not dtype.is_floating_point or dtype.itemsize == 1:
        dtype = bias.dtype if bias is not None and bias.dtype.itemsize > 1 else torch.float32
    return dtype  # type: ignore[no-any-return]


def list_formats(model: torch.nn.Module) -> dict[str, int]:
    """Return the formats that a model dequantizes for each call, with the number of layers."""
    formats: dict[str, int] = {}
    for layer in model.modules():
        if isinstance(layer, DequantizedLinear):
            formats[layer.format.name] = formats.get(layer.format.name, 0) + 1
    return formats
