"""Quantized layers for which a device has no kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from anyaccel.backends.sheet import Sheet
from anyaccel.errors import UsageError
from anyaccel.planning.weight_formats import check_not_quantized_otherwise, find_weights_to_quantize
from anyaccel.planning.weight_kernels import has_kernels
from anyaccel.quantized_weights.dequantized_linear import DequantizedLinear
from anyaccel.quantized_weights.quantize import is_partly_quantized, quantize_model
from anyaccel.quantized_weights.replace_layers import list_formats, replace_quantized_layers
from anyaccel.runtime.introspection import find_models, read_facts
from anyaccel.runtime.placement_state import Placement
from anyaccel.runtime.speed.quantize import check_not_quantized

__all__ = [
    "check_no_merged_adapters",
    "check_not_dequantized",
    "find_models_to_quantize",
    "quantize_models",
    "replace_unsupported_layers",
]


def find_models_to_quantize(pipe: Any, weights: str | None) -> dict[str, torch.nn.Module]:
    """Return the models that `weights=` quantizes, without those that have this format already.

    Raise `UsageError` if one of them has another format.
    """
    if weights is None:
        return {}
    facts = read_facts(pipe)
    chosen, models = find_weights_to_quantize(facts), find_models(pipe)
    for component in facts.components:
        if component.name in chosen:
            check_not_quantized_otherwise(component, weights)
    done = {component.name for component in facts.components if component.weight_error is not None}
    found = {name: models[name] for name in chosen if name not in done or is_partly_quantized(models[name])}
    if found:
        check_not_quantized(pipe, f"weights={weights!r}")
    return found


def quantize_models(models: Mapping[str, torch.nn.Module], weights: str | None) -> None:
    """Quantize the linear layers of models, permanently."""
    for model in models.values():
        assert weights is not None
        quantize_model(model, weights)


def replace_unsupported_layers(models: Mapping[str, torch.nn.Module], sheet: Sheet, *, virtual: bool) -> None:
    """Replace the quantized layers of models that cannot run on the device as they are."""
    for model in models.values():
        replace_quantized_layers(model, lambda library: has_kernels(sheet, library, virtual=virtual))


def check_not_dequantized(pipe: Any, operation: str) -> None:
    """Raise `UsageError` if `operation` would change or save quantized layers that were replaced."""
    for name, model in find_models(pipe).items():
        formats = list_formats(model)
        if formats:
            raise UsageError(
                f"{operation} is not possible: the device dequantizes the {', '.join(formats)} weights of {name} for "
                "each call",
                hint=f"call {operation} before the pipeline is placed, or first call pipe.{name}.dequantize(), which "
                "needs the memory of the whole weights",
            )


def check_no_merged_adapters(pipe: Any, placement: Placement) -> None:
    """Raise `UsageError` after `pipe.transformer.fuse_lora()`, which cannot change quantized weights."""
    models = find_models(pipe)
    quantized = (*placement.plan.dequantized.value, *placement.plan.weights.value)
    for name in dict.fromkeys(name for name, _ in quantized if name in models):
        for layer in models[name].modules():
            if getattr(layer, "merged", False) and isinstance(getattr(layer, "base_layer", None), DequantizedLinear):
                raise UsageError(
                    f"adapters cannot be fused into the quantized weights of {name}",
                    hint=f"call pipe.{name}.unfuse_lora(): without fusing, adapters give the same image",
                )
