"""Float8 quantization of large linear layers in denoisers, which discards the original weights."""

from __future__ import annotations

import logging
from typing import Any

import torch

from anyaccel.errors import UsageError
from anyaccel.planning.decision import Decision
from anyaccel.planning.quality_levels import SMALLEST_WEIGHT
from anyaccel.runtime.introspection import find_denoisers, find_models
from anyaccel.runtime.placement_state import Placement
from anyaccel.runtime.speed.float8 import Float8Linear, Float8NotSupportedError, check_float8

__all__ = ["check_not_quantized", "is_quantized", "quantize_denoisers"]

_LOG = logging.getLogger("anyaccel")
_QUANTIZED_ATTRIBUTE = "_anyaccel_quantized"
# `torch._scaled_mm` requires dimensions that are multiples of this.
_SIZE_MULTIPLE = 16
# Parts of the names of layers that are applied to the timestep embedding: one row per image.
_FEW_ROWS = ("norm", "embed", "modulation")


def quantize_denoisers(pipe: Any, placement: Placement) -> None:
    """Quantize the denoisers that are not yet quantized; if this is unsupported, report the reason."""
    if not placement.plan.quantization.value or placement.report.quantization is not None:
        return
    # Pipelines share models: another one may have quantized them already.
    todo = {name: model for name, model in find_denoisers(pipe, placement).items() if not is_quantized(model)}
    for name, model in todo.items():
        layers = _find_layers(model)
        try:
            _check_support(layers)
        except Float8NotSupportedError as error:
            _LOG.warning("anyaccel: %s cannot be quantized: %s", name, error)
            placement.report.quantization = Decision("", f"{name} cannot be quantized: {error}")
            return
        # Set before the first layer: if memory runs out halfway, the model is already partly quantized.
        vars(model)[_QUANTIZED_ATTRIBUTE] = placement.plan.quantization.value
        for parent, layer_name in layers:  # one at a time: only one weight exists in both dtypes
            setattr(parent, layer_name, Float8Linear(getattr(parent, layer_name)))
    if todo:
        placement.opened.driver.empty_cache()


def _find_layers(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str]]:
    """Return the layers to quantize, as pairs of parent module and attribute name."""
    return [
        (parent, name)
        for path, parent in model.named_modules()
        for name, layer in parent.named_children()
        if is_worth_quantizing(layer, f"{path}.{name}")
    ]


def _check_support(layers: list[tuple[torch.nn.Module, str]]) -> None:
    """Raise if the device of any layer does not support float8 matrix multiplication."""
    weights = [getattr(parent, name).weight for parent, name in layers]
    for device, dtype in {(weight.device, weight.dtype) for weight in weights}:
        check_float8(device, dtype)


def is_worth_quantizing(layer: torch.nn.Module, name: str) -> bool:
    """Return whether a layer is a large linear layer that is applied to many rows at a time."""
    if type(layer) is not torch.nn.Linear or layer.weight.numel() < SMALLEST_WEIGHT:
        return False
    has_few_rows = any(word in part for part in name.split(".") for word in _FEW_ROWS)
    return not has_few_rows and not any(size % _SIZE_MULTIPLE for size in layer.weight.shape)


def is_quantized(model: Any) -> bool:
    """Return whether `quantize_denoisers` has quantized a model."""
    return isinstance(model, torch.nn.Module) and _QUANTIZED_ATTRIBUTE in vars(model)


def check_not_quantized(pipe: Any, operation: str) -> None:
    """Raise `UsageError` if a model is quantized, because `operation` requires the original weights."""
    for name, model in find_models(pipe).items():
        if is_quantized(model):
            raise UsageError(
                f"{operation} requires the original weights of {name}, but an earlier call quantized them to "
                f"{vars(model)[_QUANTIZED_ATTRIBUTE]}",
                hint="load the pipeline again, and change it before its first call with speed='fast' or speed='draft'",
            )
