"""Quantizing: large matrices of denoisers in 8 bits, by torchao; their weights are not what they were from then on."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from dataclasses import replace
from typing import Any

import torch

from anyaccel.errors import UsageError
from anyaccel.planning.decision import Decision
from anyaccel.planning.speed_level import SMALLEST_WEIGHT
from anyaccel.runtime.placement import Placement, find_models

__all__ = ["check_not_quantized", "has_torchao", "is_quantized", "quantize_denoisers"]

_LOG = logging.getLogger("anyaccel")
_MARK = "_anyaccel_quantized"
_MULTIPLE = 16
"""Sides of a matrix in 8 bits are multiples of this."""


def has_torchao() -> bool:
    """Whether the library is there."""
    return importlib.util.find_spec("torchao") is not None


def quantize_denoisers(pipe: Any, placement: Placement) -> None:
    """Once: the matrices of the models that run at every step; where that fails, the plan says why."""
    if not placement.plan.quantized.value:
        return
    models = find_models(pipe)
    for name in placement.denoisers:
        model = models[name]
        if is_quantized(model):
            continue
        try:
            _quantize(model)
        except (AssertionError, RuntimeError, ImportError, NotImplementedError) as error:
            words = next(iter(str(error).splitlines()), type(error).__name__)
            _LOG.warning("anyaccel: %s stays in its own type: %s", name, words)
            placement.plan = replace(placement.plan, quantized=Decision("", f"torchao cannot: {words}"))
            return
        vars(model)[_MARK] = placement.plan.quantized.value


def _quantize(model: torch.nn.Module) -> None:
    quantization: Any = importlib.import_module("torchao.quantization")
    config = quantization.Float8DynamicActivationFloat8WeightConfig(granularity=quantization.PerRow())
    quantization.quantize_(model, config, filter_fn=gains)


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
