"""A pipeline in memory, copied without its weights: the same models with shapes alone, as shells."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch

from anyaccel.tracing.pipeline_trace import PipelineTrace
from anyaccel.upstream.accelerate_internals import HOOK_ATTRIBUTES
from anyaccel.upstream.diffusers_internals import HOOK_ATTRIBUTE, PIPELINE_HOOKS
from anyaccel.upstream.torch_internals import MODULE_HOOKS, unwrap_compiled
from anyaccel.upstream.transformers_internals import CAPTURE_MARK

__all__ = ["clone_pipeline"]

_ADDED = (*HOOK_ATTRIBUTES, HOOK_ATTRIBUTE, "_anyaccel_overrides", "forward")
"""What offloading and placing put on a model that a plain one does not have."""


def clone_pipeline(pipe: Any, kind: Any, traced: PipelineTrace) -> Any:
    """A plain pipeline of a class with the parts of another one, whose models are shells; the other stays as it is."""
    clone: Any = kind.__new__(kind)
    vars(clone).update(vars(pipe))
    for name, part in pipe.components.items():
        if isinstance(part, torch.nn.Module):
            vars(clone)[name] = traced.shell(name, copy_without_weights(unwrap_compiled(part)))
        elif hasattr(part, "set_timesteps"):
            vars(clone)[name] = copy.deepcopy(part)
    vars(clone)[PIPELINE_HOOKS] = []
    clone.set_progress_bar_config(disable=True)
    return clone


def copy_without_weights(model: torch.nn.Module) -> torch.nn.Module:
    """The same model with its parameters and buffers on `meta`, and without hooks."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        shape = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        memo[id(tensor)] = torch.nn.Parameter(shape, requires_grad=False) if is_parameter else shape
    for module in model.modules():
        memo |= {id(vars(module)[name]): OrderedDict() for name in MODULE_HOOKS if name in vars(module)}
        memo |= {id(vars(module)[name]): None for name in _ADDED if vars(module).get(name) is not None}
    copied = copy.deepcopy(model, memo)
    for module in copied.modules():
        for name in (*_ADDED, CAPTURE_MARK):
            vars(module).pop(name, None)
    return copied.eval()
