"""Layer streaming: weights stay on the CPU and each layer is copied to the device when it runs.

This is diffusers' group offloading with one leaf module per group. Blocks are not used as groups
for two reasons. One block of the Stable Diffusion XL UNet holds 47% of its weights, and block-level
offloading relies on `forward`, which pipelines never call on an autoencoder.

The private diffusers names that this module uses are listed in `upstream/diffusers_internals.py`.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Iterator
from itertools import chain
from types import MethodType
from typing import Any

import torch

from anyaccel.forward_overrides import find_replaced_forward
from anyaccel.library_logging import drop_log_records_always
from anyaccel.upstream.diffusers_internals import (
    GROUP_OFFLOADING,
    HOOK_ATTRIBUTE,
    PREFETCH_HOOKS,
    SKIPPED_LAYERS,
    is_hook_forward,
    read_module,
)
from anyaccel.upstream.torch_internals import read_version

__all__ = ["end_streaming_call", "has_unstreamed_layers", "is_streamed", "start_streaming", "stop_streaming"]

# Attributes that are added to diffusers' hook registries: the `forward` in the module's `__dict__` before streaming (or
# None), and the parameters and names of buffers of the model when streaming began.
_ORIGINAL_FORWARD = "_anyaccel_before"
_WEIGHTS = "_anyaccel_weights"
# Modules that are never called, so that a hook of theirs would never run.
_CONTAINERS = (torch.nn.ParameterDict, torch.nn.ParameterList, torch.nn.ModuleDict, torch.nn.ModuleList)


def start_streaming(model: torch.nn.Module, device: torch.device, *, use_stream: bool, pin: bool) -> None:
    """Stream the layers of a model from host memory to a device.

    If `use_stream` is set, the next layer is prefetched on another stream. If `pin` is set, all weights
    stay in pinned memory; otherwise each layer is pinned when it is copied
    (https://github.com/huggingface/diffusers/pull/11106).
    """
    from diffusers.hooks.group_offloading import apply_group_offloading
    from diffusers.hooks.hooks import HookRegistry

    if is_streamed(model):  # by another pipeline that shares the model
        stop_streaming(model)
    drop_log_records_always(apply_group_offloading.__module__, SKIPPED_LAYERS)
    # diffusers replaces `forward` of every module and has no function to restore it.
    originals = {module: vars(module).get("forward") for module in model.modules()}
    apply_group_offloading(
        model, device, offload_type="leaf_level", use_stream=use_stream, low_cpu_mem_usage=use_stream and not pin
    )
    # Classes are replaced because diffusers names the classes of its groups, registries and forwards in its functions,
    # with no way to pass others (0.42.1):
    # https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/hooks/group_offloading.py#L818-L915
    # https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/hooks/hooks.py#L195-L241
    # New groups would copy and pin all weights once more, and building them without `apply_group_offloading` would
    # duplicate how it assigns layers to groups. A registry may already exist, with hooks of the user.
    for module, registry in _list_registries(model):
        hook = registry.get_hook(GROUP_OFFLOADING)
        if hook is not None:
            hook.group.__class__ = _make_group_class()
            hook.group.owners, hook.group.versions = ([] if hook.group.modules else [module]), {}
    _join_attention_groups(model)
    _join_container_groups(model)
    registry = HookRegistry.check_if_exists_or_initialize(model)
    setattr(registry, _WEIGHTS, _list_weights(model))
    for module, registry in _list_registries(model):
        setattr(registry, _ORIGINAL_FORWARD, originals[module])
        registry.__class__ = _make_registry_class()
        forward: Any = vars(module).get("forward")
        if is_hook_forward(forward):
            vars(module)["forward"] = _StreamingForward(forward.func, *forward.args)


@functools.cache
def _make_group_class() -> type:
    from diffusers.hooks.group_offloading import ModuleGroup

    class HostBackedGroup(ModuleGroup):
        """An offload group that restores its original host tensors instead of copying weights back.

        Without a stream, diffusers copies weights back to the CPU after each layer, which takes 13.2 s
        instead of 4.0 s per step for FLUX.1-schnell on one H200. With a stream, diffusers restores the
        tensors that it saved at the start, which would discard a later `weight.data = tensor`. Values that
        the layer itself changes, such as the statistics of a batch norm, are copied back.
        """

        versions: dict[torch.Tensor, int]
        """The version counters of the tensors on the device, when they were loaded."""
        owners: list[torch.nn.Module]
        """Modules that are not streamed with their children, only with their own parameters and buffers."""

        # diffusers stores lists, which do not contain parameters that were replaced since.
        @property
        def parameters(self) -> list[torch.nn.Parameter]:  # type: ignore[override]
            return [*chain.from_iterable(owner.parameters(recurse=False) for owner in self.owners)]

        @property
        def buffers(self) -> list[torch.Tensor]:  # type: ignore[override]
            return [*chain.from_iterable(owner.buffers(recurse=False) for owner in self.owners)]

        @torch.compiler.disable()  # type: ignore[untyped-decorator]
        def onload_(self) -> None:
            # Inference tensors have no version counter: https://github.com/pytorch/pytorch/pull/54403
            with torch.inference_mode(False), torch.no_grad():
                _store_host_tensors(self)
                super().onload_()
                self.versions = _read_versions(self)

        @torch.compiler.disable()  # type: ignore[untyped-decorator]
        def offload_(self) -> None:
            with torch.inference_mode(False), torch.no_grad():
                _save_changes(self)
                if self.stream is None:
                    for tensor in list(self.cpu_param_dict):
                        tensor.data = self.cpu_param_dict.pop(tensor)
                super().offload_()  # does not copy tensors that are already on the CPU
                # With a stream, diffusers 0.42.1 leaves the buffers of layers on the device, such as quantized weights.
                for tensor in _list_tensors(self) if self.stream is not None else ():
                    if tensor.device != self.offload_device:
                        tensor.data = self.cpu_param_dict[tensor]

    return HostBackedGroup


def _store_host_tensors(group: Any) -> None:
    """Store the CPU tensors of a group, including those that the user has replaced since the last forward."""
    for tensor in _list_tensors(group):
        if tensor.device != group.offload_device or type(tensor.data) is not torch.Tensor:
            continue
        stored = group.cpu_param_dict.get(tensor)
        if stored is None or stored.data_ptr() != tensor.data_ptr():
            group.cpu_param_dict[tensor] = tensor.data


def _save_changes(group: Any) -> None:
    """Copy the values that were changed on the device to the CPU tensors."""
    # The kernel of batch norm changes the statistics without incrementing their version counters.
    changes_buffers = any(module.training for module in (*group.modules, *group.owners))
    for tensor, version in _read_versions(group).items():
        is_buffer = not isinstance(tensor, torch.nn.Parameter)
        if version != group.versions.get(tensor, version) or (is_buffer and changes_buffers):
            group.cpu_param_dict[tensor].copy_(tensor.data.to(group.offload_device))


def _read_versions(group: Any) -> dict[torch.Tensor, int]:
    on_device = [tensor for tensor in group.cpu_param_dict if tensor.device != group.offload_device]
    return {tensor: read_version(tensor) for tensor in on_device}


@functools.cache
def _make_registry_class() -> type:
    from diffusers.hooks.hooks import HookRegistry

    class StreamingRegistry(HookRegistry):
        """A hook registry that is empty in copies of the model, which are not streamed."""

        def __deepcopy__(self, memo: dict[int, Any]) -> HookRegistry:
            return HookRegistry(copy.deepcopy(read_module(self), memo))

        def __reduce__(self) -> tuple[Any, ...]:
            return HookRegistry, (read_module(self),)

    return StreamingRegistry


class _StreamingForward(functools.partial[Any]):
    """A module's `forward` with hooks; in copies of the module, it is the one before streaming."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        original = self._find_original()
        if original is not None:
            return copy.deepcopy(original, memo)
        module = copy.deepcopy(self.args[0], memo)
        return MethodType(type(module).forward, module)

    def __reduce__(self) -> tuple[Any, ...]:
        original = self._find_original()
        if original is not None:
            return operator.itemgetter(0), ((original,),)
        return getattr, (self.args[0], "forward")  # the method of the class: pickle restores `__dict__` later

    def _find_original(self) -> Any:
        return vars(vars(self.args[0])[HOOK_ATTRIBUTE]).get(_ORIGINAL_FORWARD)


def is_streamed(model: torch.nn.Module) -> bool:
    """Return whether `start_streaming` was called for a model."""
    return hasattr(vars(model).get(HOOK_ATTRIBUTE), _WEIGHTS)


def has_unstreamed_layers(model: torch.nn.Module) -> bool:
    """Return whether a streamed model has layers that are not streamed.

    This is the case if parameters were added or replaced or buffers were added after streaming started, or if the
    user deleted the `forward` of a module, and with it the hook.
    """
    if not is_streamed(model):
        return False
    before, buffers_before = getattr(vars(model)[HOOK_ATTRIBUTE], _WEIGHTS)
    now, buffers = _list_weights(model)
    if len(before) != len(now) or not all(map(operator.is_, before, now)) or buffers != buffers_before:
        return True
    return any(registry.hooks and find_replaced_forward(module) is None for module, registry in _list_registries(model))


def _list_weights(model: torch.nn.Module) -> tuple[tuple[torch.nn.Parameter, ...], tuple[str, ...]]:
    """Return the parameters of a model and the names of its buffers."""
    return tuple(model.parameters()), tuple(name for name, _ in model.named_buffers())


def end_streaming_call(model: torch.nn.Module, *, failed: bool = False) -> None:
    """Offload the layers that a call left on the device: prefetched layers, or those of a failed call."""
    if not is_streamed(model):
        return
    for _, registry in _list_registries(model):
        hook = registry.get_hook(GROUP_OFFLOADING)
        if hook is not None and any(tensor.device != hook.group.offload_device for tensor in _list_tensors(hook.group)):
            hook.group.offload_()
        # These hooks record the order of layers and remove themselves when the model's forward ends. Pipelines call an
        # autoencoder's decode, not its forward, so the recorded list would grow with every call.
        for name in () if failed else PREFETCH_HOOKS:
            registry.remove_hook(name, recurse=False)


def stop_streaming(model: torch.nn.Module) -> None:
    """Move a streamed model's weights to host memory, and restore its original `forward` methods."""
    if not is_streamed(model):
        return
    end_streaming_call(model)
    delattr(vars(model)[HOOK_ATTRIBUTE], _WEIGHTS)
    for module, registry in _list_registries(model):
        forward, is_replaced = vars(module).get("forward"), _is_forward_replaced(module)
        _remove_streaming_hook(registry)
        original = vars(registry).pop(_ORIGINAL_FORWARD, registry)
        if is_replaced:
            vars(module)["forward"] = forward
        if registry.hooks or original is registry:  # the registry has other hooks, or was not created by streaming
            continue
        del vars(module)[HOOK_ATTRIBUTE]
        if is_replaced:
            continue
        vars(module).pop("forward", None)
        if original is not None:
            vars(module)["forward"] = original


def _is_forward_replaced(module: torch.nn.Module) -> bool:
    """Return whether the user replaced the `forward` of a module after streaming started."""
    forward = find_replaced_forward(module)
    return forward is not None and not is_hook_forward(forward)


def _remove_streaming_hook(registry: Any) -> None:
    """Remove the hook; a `forward` of the user may still call diffusers' function, which then does nothing else."""
    hook = registry.get_hook(GROUP_OFFLOADING)
    if hook is not None:
        hook.fn_ref.pre_forward = lambda module, *args, **kwargs: (args, kwargs)
        hook.fn_ref.post_forward = lambda module, output: output
        registry.remove_hook(GROUP_OFFLOADING, recurse=False)


def _join_attention_groups(model: torch.nn.Module) -> None:
    """Stream the output projection of `torch.nn.MultiheadAttention` together with the attention module."""
    # The module reads `out_proj.weight` without calling `out_proj`, so a hook of `out_proj` would never run:
    # https://github.com/pytorch/pytorch/issues/78109
    for module in model.modules():
        if isinstance(module, torch.nn.MultiheadAttention):
            outer, inner = vars(module)[HOOK_ATTRIBUTE], vars(module.out_proj)[HOOK_ATTRIBUTE]
            group, last = outer.get_hook(GROUP_OFFLOADING).group, inner.get_hook(GROUP_OFFLOADING).group
            group.modules.append(module.out_proj)
            group.cpu_param_dict.update(last.cpu_param_dict)
            inner.remove_hook(GROUP_OFFLOADING, recurse=False)


def _join_container_groups(model: torch.nn.Module) -> None:
    """Stream parameters in containers, such as those of LoHa adapters, together with the module that contains them."""
    from diffusers.hooks.hooks import HookRegistry

    parents = {child: module for module in model.modules() for child in module.children()}
    for container, registry in list(_list_registries(model)):
        hook = registry.get_hook(GROUP_OFFLOADING)
        if hook is None or not isinstance(container, _CONTAINERS) or container not in parents:
            continue
        owner = parents[container]
        while isinstance(owner, _CONTAINERS) and owner in parents:
            owner = parents[owner]
        registry.remove_hook(GROUP_OFFLOADING, recurse=False)
        owner_registry: Any = HookRegistry.check_if_exists_or_initialize(owner)
        owner_hook = owner_registry.get_hook(GROUP_OFFLOADING)
        if owner_hook is None:
            hook.group.onload_leader = hook.group.offload_leader = owner
            owner_registry.register_hook(hook, GROUP_OFFLOADING)
        else:
            owner_hook.group.owners.append(container)
            owner_hook.group.cpu_param_dict.update(hook.group.cpu_param_dict)


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
