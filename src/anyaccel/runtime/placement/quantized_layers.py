"""Quantized layers for which a device has no kernels."""

from __future__ import annotations

from typing import Any

from anyaccel.backends.sheet import Sheet
from anyaccel.planning.plan import Plan
from anyaccel.planning.weight_kernels import has_kernels
from anyaccel.quantized_weights.replace_layers import replace_quantized_layers
from anyaccel.runtime.introspection import find_models

__all__ = ["replace_unsupported_layers"]


def replace_unsupported_layers(pipe: Any, plan: Plan, sheet: Sheet) -> None:
    """Replace the quantized layers of a pipeline that cannot run on the device as they are."""
    models = find_models(pipe)
    for name in dict.fromkeys(name for name, _ in plan.dequantized.value):
        replace_quantized_layers(models[name], lambda library: has_kernels(sheet, library, virtual=plan.virtual))
