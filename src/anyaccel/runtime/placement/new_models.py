"""Placement of models that the user adds to a placed pipeline."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from anyaccel.backends.device import find_device
from anyaccel.library_logging import FLOAT32_ADVICE, drop_log_records
from anyaccel.runtime.introspection import find_models, read_dtype, read_facts
from anyaccel.runtime.placement.quantized_layers import (
    find_models_to_quantize,
    quantize_models,
    replace_unsupported_layers,
)
from anyaccel.runtime.placement_state import Placement, record_placed_models
from anyaccel.runtime.workarounds.function_modes import make_pipeline_function_mode

__all__ = ["choose_new_dtype", "place_new_models"]


def place_new_models(pipe: Any, placement: Placement) -> None:
    """Move and cast the models that the user has added or replaced since the pipeline was placed."""
    placed = {name: reference() for name, reference in placement.placed.items()}
    new = {name: model for name, model in find_models(pipe).items() if placed.get(name) is not model}
    if not new:
        return
    quantize_models(find_models_to_quantize(pipe, placement.options.weights), placement.options.weights)
    sheet = placement.opened.sheet
    replace_unsupported_layers(new, sheet, virtual=find_device(sheet.name).virtual)
    placement.placed |= {name: weakref.ref(model) for name, model in new.items()}
    placement.call_plans.clear()
    facts = read_facts(pipe)
    placement.denoisers = facts.denoisers
    if placement.offloaded_by_user:
        return
    if placement.residence != "resident":
        placement.residence = None  # the next rule then moves all models, including the new ones
    quantized = {component.name for component in facts.components if component.quantized}
    target = placement.device if placement.residence == "resident" else torch.device("cpu")
    with (
        torch.no_grad(),
        make_pipeline_function_mode(placement.plan, placement.device),
        drop_log_records(*FLOAT32_ADVICE),
    ):
        for name, model in new.items():
            own = read_dtype(model)
            dtype = own if name in quantized else choose_new_dtype(own, placement)
            # Some modules of a model that keeps its dtype may have another one.
            model.to(target) if dtype == own else model.to(target, getattr(torch, dtype))
            placement.own_dtypes[name] = placement.placed_dtypes[name] = dtype
    record_placed_models(new.values(), placement)


def choose_new_dtype(loaded: str, placement: Placement) -> str:
    """Return the dtype for a model that the user assigned: its own, as in diffusers, if the device supports it.

    If anyaccel chose the dtype of a pipeline that was loaded in float32, a model in float32 is cast like the others.
    """
    chosen = placement.plan.dtype.value
    is_automatic = placement.options.dtype is None and chosen not in placement.loaded.values()
    return chosen if is_automatic and loaded == "float32" else placement.opened.sheet.adjusted_dtype(loaded)
