"""Streaming: weights wait in host memory, and each layer's come to the device while it runs.

This is diffusers' group offloading with one leaf module per group. Blocks are not used as groups: one block of SDXL's
UNet is 47 % of its weights, and an autoencoder's blocks belong to a forward that pipelines never call.

What it relies on in diffusers besides `apply_group_offloading` is in `upstream/diffusers_internals.py`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from typing import Any

import torch

from anyaccel.library_logging import drop_log_records_always
from anyaccel.upstream.diffusers_internals import GROUP_OFFLOADING, HOOK_ATTRIBUTE, PREFETCH_HOOKS, SKIPPED_LAYERS

__all__ = ["end_streaming_call", "has_new_weights", "is_streamed", "start_streaming", "stop_streaming"]

_BEFORE = "_anyaccel_before"
"""Attribute of our registries: the module's own `forward` before, or None."""
_WEIGHTS = "_anyaccel_weights"
"""Attribute of the model's registry: its parameters when streaming began."""


def start_streaming(model: torch.nn.Module, device: torch.device, *, use_stream: bool, pin: bool) -> None:
    """Let a model's layers come to a device one by one, from host memory.

    With `use_stream` the next layer is fetched while one runs. `pin` keeps all weights in pinned memory; otherwise each
    layer is pinned when it is fetched.
    """
    from diffusers.hooks.group_offloading import apply_group_offloading
    from diffusers.hooks.hooks import HookRegistry

    if is_streamed(model):  # by another pipeline that has the same model
        stop_streaming(model)
    drop_log_records_always(apply_group_offloading.__module__, SKIPPED_LAYERS)
    before = {module: vars(module).get("forward") for module in model.modules()}
    apply_group_offloading(
        model, device, offload_type="leaf_level", use_stream=use_stream, low_cpu_mem_usage=use_stream and not pin
    )
    _join_attention(model)
    for _, registry in _list_registries(model):
        hook = registry.get_hook(GROUP_OFFLOADING)
        if hook is not None:
            hook.group.__class__ = _make_group_class()
    registry = HookRegistry.check_if_exists_or_initialize(model)
    setattr(registry, _WEIGHTS, tuple(model.parameters()))
    for module, registry in _list_registries(model):
        setattr(registry, _BEFORE, before[module])


@functools.cache
def _make_group_class() -> type:
    from diffusers.hooks.group_offloading import ModuleGroup

    class HostBackedGroup(ModuleGroup):
        """A group whose tensors return to the host memory that they came from.

        Without a stream diffusers copies weights back after each layer, which took 13.2 s instead of 4.0 s per step of
        FLUX.1-schnell on one H200. With one it returns to the memory of the beginning, so that a later
        `weight.data = tensor` would be lost.
        """

        @torch.compiler.disable()  # type: ignore[untyped-decorator]
        def onload_(self) -> None:
            for tensor in _list_tensors(self):
                if tensor.device != self.offload_device or type(tensor.data) is not torch.Tensor:
                    continue
                known = self.cpu_param_dict.get(tensor)
                if known is None or known.data_ptr() != tensor.data_ptr():
                    self.cpu_param_dict[tensor] = tensor.data
            super().onload_()

        @torch.compiler.disable()  # type: ignore[untyped-decorator]
        def offload_(self) -> None:
            if self.stream is None:
                for tensor in list(self.cpu_param_dict):
                    tensor.data = self.cpu_param_dict.pop(tensor)
            super().offload_()  # what is on the host already stays as it is

    return HostBackedGroup


def is_streamed(model: torch.nn.Module) -> bool:
    """Return whether `start_streaming` was called for a model."""
    return hasattr(vars(model).get(HOOK_ATTRIBUTE), _WEIGHTS)


def has_new_weights(model: torch.nn.Module) -> bool:
    """Return whether a streamed model has parameters that it did not have when streaming began."""
    if not is_streamed(model):
        return False
    known, now = getattr(vars(model)[HOOK_ATTRIBUTE], _WEIGHTS), tuple(model.parameters())
    return len(known) != len(now) or not all(map(operator.is_, known, now))


def end_streaming_call(model: torch.nn.Module, *, failed: bool = False) -> None:
    """Send the layers back that a call left on the device: those that were fetched ahead, or when it failed.

    A model whose own forward did not run, such as an autoencoder, keeps no note of its order: the list would grow with
    every call.
    """
    if not is_streamed(model):
        return
    for _, registry in _list_registries(model):
        hook = registry.get_hook(GROUP_OFFLOADING)
        if hook is not None and any(one.device != hook.group.offload_device for one in _list_tensors(hook.group)):
            hook.group.offload_()
        for name in () if failed else PREFETCH_HOOKS:
            registry.remove_hook(name, recurse=False)


def stop_streaming(model: torch.nn.Module) -> None:
    """Bring a streamed model's weights to host memory, and leave no hook and no `forward` of diffusers' behind."""
    if not is_streamed(model):
        return
    end_streaming_call(model)
    delattr(vars(model)[HOOK_ATTRIBUTE], _WEIGHTS)
    for module, registry in _list_registries(model):
        registry.remove_hook(GROUP_OFFLOADING, recurse=False)
        before = vars(registry).pop(_BEFORE, registry)
        if registry.hooks or before is registry:  # somebody else's are there, or put it there since
            continue
        del vars(module)[HOOK_ATTRIBUTE]
        vars(module).pop("forward", None)
        if before is not None:
            vars(module)["forward"] = before


def _join_attention(model: torch.nn.Module) -> None:
    """Let torch's own attention bring its last layer along: it reads the weights of that layer and does not call it."""
    for module in model.modules():
        if isinstance(module, torch.nn.MultiheadAttention):
            outer, inner = vars(module)[HOOK_ATTRIBUTE], vars(module.out_proj)[HOOK_ATTRIBUTE]
            group, last = outer.get_hook(GROUP_OFFLOADING).group, inner.get_hook(GROUP_OFFLOADING).group
            group.modules.append(module.out_proj)
            group.cpu_param_dict.update(last.cpu_param_dict)
            inner.remove_hook(GROUP_OFFLOADING, recurse=False)


def _list_registries(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, Any]]:
    for module in model.modules():
        registry = vars(module).get(HOOK_ATTRIBUTE)
        if registry is not None:
            yield module, registry


def _list_tensors(group: Any) -> Iterator[torch.Tensor]:
    for module in group.modules:
        yield from module.parameters()
        yield from module.buffers()
    yield from group.parameters
    yield from group.buffers
