"""Copy of an in-memory pipeline with its models on the `meta` device."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch

from anyaccel.tracing.pipeline_trace import PipelineTrace
from anyaccel.upstream.accelerate_internals import HOOK_ATTRIBUTES
from anyaccel.upstream.diffusers_internals import HOOK_ATTRIBUTE, PIPELINE_HOOKS
from anyaccel.upstream.torch_compile_internals import unwrap_compiled
from anyaccel.upstream.torch_internals import MODULE_HOOKS
from anyaccel.upstream.transformers_internals import OUTPUT_HOOKS_ATTRIBUTE

__all__ = ["clone_pipeline"]

# Attributes that offloading and `anyaccel.place` add to a model.
_ADDED = (*HOOK_ATTRIBUTES, HOOK_ATTRIBUTE, "_anyaccel_overrides", "forward")


def clone_pipeline(pipe: Any, kind: Any, traced: PipelineTrace) -> Any:
    """Return a copy of `pipe` as an instance of `kind`, with its models on the `meta` device.

    `traced` records the model calls of the copy. `pipe` is not changed.
    """
    # Without __init__, which would register the components and read their configs again.
    clone: Any = kind.__new__(kind)
    vars(clone).update(vars(pipe))
    for name, component in pipe.components.items():
        if isinstance(component, torch.nn.Module):
            vars(clone)[name] = traced.wrap_model(name, copy_without_weights(unwrap_compiled(component)))
        elif hasattr(component, "set_timesteps"):  # a scheduler: a traced call changes its state
            vars(clone)[name] = copy.deepcopy(component)
    vars(clone)[PIPELINE_HOOKS] = []
    clone.set_progress_bar_config(disable=True)
    return clone


def copy_without_weights(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a model with its parameters and buffers on `meta`, without hooks."""
    # deepcopy takes an entry of the memo instead of copying the object: no weight is ever duplicated.
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        memo[id(tensor)] = torch.nn.Parameter(meta, requires_grad=False) if is_parameter else meta
    for module in model.modules():
        memo |= {id(vars(module)[name]): OrderedDict() for name in MODULE_HOOKS if name in vars(module)}
        memo |= {id(vars(module)[name]): None for name in _ADDED if vars(module).get(name) is not None}
    copied = copy.deepcopy(model, memo)
    for module in copied.modules():
        for name in (*_ADDED, OUTPUT_HOOKS_ATTRIBUTE):
            vars(module).pop(name, None)
    return copied.eval()
