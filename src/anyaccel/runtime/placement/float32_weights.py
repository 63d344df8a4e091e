"""Weights that stay in float32 in a half-precision pipeline: those that `_keep_in_fp32_modules` lists.

`from_pretrained` does not cast them, but `to(dtype)` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from anyaccel.planning.plan import Plan
from anyaccel.runtime.introspection import find_components
from anyaccel.upstream import diffusers_internals, transformers_internals

__all__ = ["read_float32_weights", "restore_float32_weights"]

# The module that a weight belongs to, and its name in the module.
_Key = tuple[torch.nn.Module, str]


def read_float32_weights(pipe: Any, plan: Plan) -> dict[_Key, torch.Tensor]:
    """Return the values of the weights that must stay in float32 and are in float32 now."""
    weights = _list_weights(pipe, plan)
    return {(module, name): weight.data for module, name, weight in weights if weight.dtype == torch.float32}


def restore_float32_weights(pipe: Any, plan: Plan, kept: Mapping[_Key, torch.Tensor]) -> None:
    """Restore the dtype and the values of the weights in `kept` that a cast has rounded.

    Weights that the user has cast before, for example with `pipe.to(torch.bfloat16)`, are not in `kept`.
    """
    for module, name, weight in list(_list_weights(pipe, plan)):
        if weight.dtype == torch.float32 or (module, name) not in kept:
            continue
        holder = torch.nn.Module()
        if isinstance(weight, torch.nn.Parameter):
            holder.register_parameter(name, weight)
        else:
            holder.register_buffer(name, weight)
        holder.to(torch.float32)  # keeps the object of the weight if the device allows it, as `module.to` does
        restored = getattr(holder, name)
        with torch.no_grad():
            restored.copy_(kept[module, name])
        if restored is not weight:
            setattr(module, name, restored)


def _list_weights(pipe: Any, plan: Plan) -> Iterator[tuple[torch.nn.Module, str, torch.Tensor]]:
    """Yield the floating-point weights that must stay in float32: their module, name and tensor."""
    if plan.dtype.value == "float32":
        return
    for component in find_components(pipe).values():
        if not isinstance(component, torch.nn.Module):
            continue
        kept = _read_names(component, plan.dtype.value)
        for path, module in component.named_modules() if kept else ():
            tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
            for name, tensor in tensors:
                if tensor.is_floating_point() and not kept.isdisjoint((*path.split("."), name)):
                    yield module, name, tensor


def _read_names(component: torch.nn.Module, dtype: str) -> frozenset[str]:
    if transformers_internals.is_transformers_model(component):
        return frozenset(transformers_internals.read_float32_modules(component, dtype))
    return frozenset(diffusers_internals.read_float32_modules(component))
