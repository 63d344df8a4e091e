"""Copy of an in-memory pipeline with its models on the `meta` device."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch

from anyaccel.forward_overrides import OVERRIDES_KEY
from anyaccel.tracing.meta_module import MetaRunner, to_meta_module
from anyaccel.tracing.meta_quantized import list_quantized, trace_as_quantized
from anyaccel.upstream.accelerate_internals import HOOK_ATTRIBUTES
from anyaccel.upstream.diffusers_internals import HOOK_ATTRIBUTE, PIPELINE_HOOKS
from anyaccel.upstream.modular_blocks import BLOCKS_ATTRIBUTE, disable_progress_bars
from anyaccel.upstream.torch_compile_internals import unwrap_compiled
from anyaccel.upstream.torch_internals import MODULE_HOOKS
from anyaccel.upstream.transformers_internals import OUTPUT_HOOKS_ATTRIBUTE

__all__ = ["clone_pipeline"]

# Attributes that offloading and `anyaccel.place` add to a model.
_ADDED = (*HOOK_ATTRIBUTES, HOOK_ATTRIBUTE, OVERRIDES_KEY, "forward")


def clone_pipeline(pipe: Any, kind: Any, runner: MetaRunner) -> Any:
    """Return a copy of `pipe` as an instance of `kind`, with its models on the `meta` device.

    `runner` runs the model calls of the copy. `pipe` is not changed.
    """
    return _clone(pipe, kind, runner, {})


def _clone(pipe: Any, kind: Any, runner: MetaRunner, copies: dict[int, Any]) -> Any:
    from diffusers import DiffusionPipeline  # late: `anyaccel run` must not import it before the script does

    # Without __init__, which would register the components and read their configs again.
    clone: Any = kind.__new__(kind)
    containers = (list, dict, set)
    vars(clone).update(
        {name: copy.copy(value) if type(value) in containers else value for name, value in vars(pipe).items()}
    )
    for name, component in pipe.components.items():
        if id(component) not in copies:
            copies[id(component)] = _copy_component(name, component, runner)
        vars(clone)[name] = copies[id(component)]
    for name, value in vars(pipe).items():  # combined pipelines call other pipelines with the same components
        if isinstance(value, DiffusionPipeline):
            vars(clone)[name] = _clone(value, type(value), runner, copies)
    if BLOCKS_ATTRIBUTE in vars(clone):
        vars(clone)[BLOCKS_ATTRIBUTE] = copy.deepcopy(vars(clone)[BLOCKS_ATTRIBUTE])
    vars(clone)[PIPELINE_HOOKS] = []
    disable_progress_bars(clone)
    return clone


def _copy_component(name: str, component: Any, runner: MetaRunner) -> Any:
    if isinstance(component, torch.nn.Module):
        return to_meta_module(copy_without_weights(unwrap_compiled(component)), name, runner)
    # A traced call changes the state of a scheduler.
    return copy.deepcopy(component) if hasattr(component, "set_timesteps") else component


def copy_without_weights(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a model with its parameters and buffers on `meta`, without hooks."""
    # deepcopy takes an entry of the memo instead of copying the object: no weight is ever duplicated.
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        memo[id(tensor)] = torch.nn.Parameter(meta, requires_grad=False) if is_parameter else meta
    quantized = list_quantized(model)
    for tensors in quantized.values():
        memo |= {id(tensor): torch.empty(0, dtype=tensor.dtype, device="meta") for tensor in tensors}
    for module in model.modules():
        # A weight that `torch.nn.utils.weight_norm` computes is a plain attribute, and deepcopy rejects it.
        computed = [value for value in vars(module).values() if isinstance(value, torch.Tensor) and not value.is_leaf]
        memo |= {id(tensor): torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in computed}
        memo |= {id(vars(module)[name]): OrderedDict() for name in MODULE_HOOKS if name in vars(module)}
        added = [vars(module).get(name) for name in _ADDED]
        added.append(getattr(vars(module).get("forward"), "beneath", None))  # copied instead of the overrides
        memo |= {id(value): None for value in added if value is not None}
    copied = copy.deepcopy(model, memo)
    for module in copied.modules():
        for name in (*_ADDED, OUTPUT_HOOKS_ATTRIBUTE):
            vars(module).pop(name, None)
    trace_as_quantized(model, copied, quantized)
    return copied.eval()
