"""Memory modes: keep all weights on the device, or only those of one phase, model or layer.

`layer` is diffusers' group offloading (`group_offload`); `component` and `phase` are implemented in
`model_offload`. On devices that share memory with the CPU, weights on the CPU would need the same
memory. There, the weights are mapped from files (`mapped_weights`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook, CpuOffload

from anyaccel.backends.device import OpenDevice, open_device
from anyaccel.backends.device_type_checks import is_host
from anyaccel.forward_overrides import Override, Slot, refresh_overrides, remove_override, run_beneath, set_override
from anyaccel.planning.memory import Residence
from anyaccel.runtime.introspection import find_models, list_denoisers
from anyaccel.runtime.placement.group_offload import (
    end_streaming_call,
    has_unstreamed_layers,
    start_streaming,
    stop_streaming,
)
from anyaccel.runtime.placement.mapped_weights import map_weights
from anyaccel.runtime.placement.model_offload import LoadHook, ModelLoader
from anyaccel.runtime.placement_state import being_offloaded
from anyaccel.tracing.footprint_measurement import supports_streaming
from anyaccel.upstream.accelerate_internals import find_hook_of_class, has_hook, remove_hook, set_hook
from anyaccel.upstream.diffusers_internals import PIPELINE_HOOKS, read_never_offloaded, read_offload_order

__all__ = ["end_phase", "has_unstreamed_weights", "map_offloaded_weights", "move_to_cpu", "set_residence"]

# Hooks of memory modes, and of offloading that the user enabled before. Users have others.
_OFFLOAD_HOOKS = (LoadHook, AlignDevicesHook, CpuOffload)


def map_offloaded_weights(pipe: Any, residence: Residence, opened: OpenDevice) -> None:
    """Replace the weights that a memory mode keeps on disk with weights mapped from files."""
    if residence == "phase" or (residence == "layer" and opened.sheet.unified_memory):
        map_weights(find_models(pipe).values())


def set_residence(pipe: Any, residence: Residence, device: torch.device, opened: OpenDevice) -> None:
    """Apply a memory mode to a pipeline; all of its weights must be on the CPU."""
    with being_offloaded(pipe), torch.no_grad():
        if residence == "resident":
            pipe.to(device, silence_dtype_warnings=True, hpu_migration=False)
        elif is_host(device):
            return  # the operating system reads mapped weights when the models run
        elif residence == "layer":
            _stream(pipe, device, use_stream=opened.driver.has_events)
        else:
            _offload_models(pipe, device, residence)


def _stream(pipe: Any, device: torch.device, *, use_stream: bool) -> None:
    """Stream the layers of all models that support it; move the other models to the device."""
    models, never_offloaded = find_models(pipe), read_never_offloaded(pipe)
    weights = sum(tensor.nbytes for model in models.values() for tensor in model.parameters())
    # Pinned weights can need twice their size: torch rounds pinned allocations up to powers of two,
    # https://github.com/pytorch/pytorch/issues/150517
    pin = use_stream and open_device("cpu").driver.memory(0).free_bytes > weights
    for name, model in models.items():
        if name in never_offloaded or not supports_streaming(model):
            model.to(device)
        else:
            start_streaming(model, device, use_stream=use_stream, pin=pin)
            set_override(model, Slot.WEIGHTS, _make_streaming_override(model, device, use_stream=use_stream, pin=pin))


def _make_streaming_override(model: torch.nn.Module, device: torch.device, *, use_stream: bool, pin: bool) -> Override:
    """Return a forward override that streams layers which a callback added, such as those of a LoRA."""
    reference = weakref.ref(model)  # the model references the override

    def stream_new_layers(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = reference()
        if module is None or not has_unstreamed_layers(module):
            return forward(*args, **kwargs)
        with torch.no_grad():
            start_streaming(module, device, use_stream=use_stream, pin=pin)
        refresh_overrides(module)
        return run_beneath(module, Slot.WEIGHTS, args, kwargs)  # `forward` belongs to the removed hooks

    return stream_new_layers


def _offload_models(pipe: Any, device: torch.device, residence: Residence) -> None:
    """Move each model to the device when it runs (`component`) or when its phase begins (`phase`)."""
    models = find_models(pipe)
    order = [name for name in read_offload_order(pipe) if name in models]
    previous = dict(zip(order[1:], order, strict=False))
    denoisers = list_denoisers(pipe)

    def replaces(name: str, other: str) -> bool:
        if residence == "component":  # as with diffusers; a ControlNet, for example, is not part of the order
            return previous.get(name) == other
        return (name in denoisers) != (other in denoisers)

    loader = ModelLoader(device, replaces)
    never_offloaded = read_never_offloaded(pipe) if residence == "component" else ()
    for name, model in models.items():
        if name in never_offloaded or isinstance(model, torch.jit.ScriptModule):  # its forward cannot be overridden
            model.to(device)
            continue
        hook = LoadHook(loader, name)
        set_hook(model, hook)
        set_override(model, Slot.WEIGHTS, hook.make_override(model))


def has_unstreamed_weights(pipe: Any) -> bool:
    """Return whether a streamed model has parameters without streaming hooks, which would stay on the CPU."""
    return any(has_unstreamed_layers(model) for model in find_models(pipe).values())


def end_phase(pipe: Any, *, failed: bool = False) -> None:
    """At the end of a call, move the models and layers that are still on the device to the CPU."""
    for model in find_models(pipe).values():
        hook = find_hook_of_class(model, LoadHook)
        if hook is not None:
            hook.loader.release_all()
        end_streaming_call(model, failed=failed)


def move_to_cpu(pipe: Any) -> None:
    """Move all weights to the CPU and remove the hooks of the current memory mode."""
    # Not `pipe.remove_all_hooks()`, which fails if a model was wrapped in a module that delegates attributes.
    vars(pipe)[PIPELINE_HOOKS] = []
    for model in find_models(pipe).values():
        for module in model.modules():
            if has_hook(vars(module)):
                remove_hook(module, _OFFLOAD_HOOKS)
        stop_streaming(model)
        remove_override(model, Slot.WEIGHTS)
    with being_offloaded(pipe):
        pipe.to("cpu", silence_dtype_warnings=True)
