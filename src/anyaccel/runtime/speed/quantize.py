"""Quantizing: large matrices of denoisers in 8 bits; their weights are not what they were from then on."""

from __future__ import annotations

import logging
from typing import Any

import torch

from anyaccel.backends.out_of_memory import is_out_of_memory
from anyaccel.errors import UsageError, first_line
from anyaccel.planning.decision import Decision
from anyaccel.planning.quality_levels import SMALLEST_WEIGHT
from anyaccel.runtime.introspection import find_denoisers, find_models
from anyaccel.runtime.placement_state import Placement
from anyaccel.runtime.speed.float8 import Float8Linear, check_float8

__all__ = ["check_not_quantized", "is_quantized", "quantize_denoisers"]

_LOG = logging.getLogger("anyaccel")
_MARK = "_anyaccel_quantized"
_MULTIPLE = 16
"""Sides of a matrix in 8 bits are multiples of this."""


def quantize_denoisers(pipe: Any, placement: Placement) -> None:
    """Quantize the matrices of the models that run at every step, once; where that fails, the report says why."""
    if not placement.plan.quantization.value or placement.report.quantization is not None:
        return
    todo = {name: model for name, model in find_denoisers(pipe, placement).items() if not is_quantized(model)}
    for name, model in todo.items():
        places = _find_places(model)
        try:
            _check(places)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            if is_out_of_memory(error):
                raise
            words = first_line(error)
            _LOG.warning("anyaccel: %s stays in its own type: %s", name, words)
            placement.report.quantization = Decision("", f"torch cannot: {words}")
            return
        vars(model)[_MARK] = placement.plan.quantization.value  # before the first: memory may run out half way
        for part, layer in places:  # one after another, so that no more than one weight is there twice
            setattr(part, layer, Float8Linear(getattr(part, layer)))
    if todo:
        placement.opened.driver.empty_cache()


def _find_places(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str]]:
    """The layers that gain: what has them, and their names there."""
    return [
        (part, name)
        for path, part in model.named_modules()
        for name, layer in part.named_children()
        if gains(layer, f"{path}.{name}")
    ]


def _check(places: list[tuple[torch.nn.Module, str]]) -> None:
    """Raise where a device cannot do what layers in 8 bits ask of it."""
    weights = [getattr(part, name).weight for part, name in places]
    for device, dtype in {(weight.device, weight.dtype) for weight in weights}:
        check_float8(device, dtype)


def gains(layer: torch.nn.Module, name: str) -> bool:
    """Whether a layer is a large matrix that many rows go through; what is made of the time alone is one row."""
    if type(layer) is not torch.nn.Linear or layer.weight.numel() < SMALLEST_WEIGHT:
        return False
    few_rows = any(word in part for part in name.split(".") for word in ("norm", "embed", "modulation"))
    return not few_rows and not any(side % _MULTIPLE for side in layer.weight.shape)


def is_quantized(model: Any) -> bool:
    """Whether a model's matrices are in 8 bits."""
    return isinstance(model, torch.nn.Module) and _MARK in vars(model)


def check_not_quantized(pipe: Any, what: str) -> None:
    """Raise where something is asked that needs the weights as they were."""
    for name, model in find_models(pipe).items():
        if is_quantized(model):
            raise UsageError(
                f"{what} needs the weights of {name} as they were, and speed= put them into {vars(model)[_MARK]}",
                hint="load the pipeline again, and ask for that first",
            )
