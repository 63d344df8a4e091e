"""Memory measurement: runs a pipeline on the `meta` device for each memory option and image count."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from anyaccel.planning.attention import AttentionRule
from anyaccel.planning.footprint import Footprint, MemorySavings, ModelCall, ModelSize, Phase
from anyaccel.planning.kernel_workspace import Workspace
from anyaccel.planning.limit_hits import TraceFacts
from anyaccel.tracing.pipeline_trace import PipelineTrace
from anyaccel.tracing.traced_output import TracedOutput, read_output
from anyaccel.upstream.diffusers_internals import (
    find_slicing_obstacle,
    read_never_offloaded,
    read_offload_order,
    supports_group_offloading,
)
from anyaccel.upstream.torch_internals import read_parameter_table

__all__ = ["Measurement", "set_vae_tiling", "supports_streaming"]

# Parameters from which a torch hook computes the weight before the forward that streaming wraps.
_COMPUTED = {"weight_g", "weight_orig"}
# A scheduler that was not called has the timesteps of its training.
_MOST_LOOPS = 4
_PARAMETER_CONTAINERS = (torch.nn.ParameterDict, torch.nn.ParameterList)
# Makes models run a part of the images at a time. Arguments: the number of images, and of images at a time.
SplitRows = Callable[[int, int | None], AbstractContextManager[None]]
# Attribute of a model with the methods that `set_vae_tiling` has called.
_ENABLED_ATTRIBUTE = "_anyaccel_enabled"
_TILING_METHODS = {"enable_slicing": "disable_slicing", "enable_tiling": "disable_tiling"}


class Measurement:
    """Memory measurement for one pipeline and one set of call arguments; footprints are cached."""

    def __init__(
        self,
        pipe: Any,
        traced: PipelineTrace,
        workspace: Workspace,
        *,
        denoisers: Collection[str],
        arguments: Callable[[int], Mapping[str, Any]],
        attention: AttentionRule,
        split_rows: SplitRows,
        size: tuple[int, int] | None = None,
        unified_memory: bool = False,
        is_host: bool = False,
        fetches_ahead: bool = False,
    ) -> None:
        self.pipe, self.traced, self.workspace = pipe, traced, workspace
        self.denoisers, self.arguments, self.attention = denoisers, arguments, attention
        self.split_rows, self.size = split_rows, size
        self.never_offloaded = () if unified_memory else read_never_offloaded(pipe)
        self.trace_facts = TraceFacts()
        """Facts of the first run."""
        self.output = TracedOutput()
        """What the first run generated."""
        self._footprints: dict[tuple[MemorySavings, int, int | None], Footprint] = {}
        models = {
            name: model
            for name, model in pipe.components.items()
            if isinstance(model, torch.nn.Module) and name not in traced.not_included
        }
        self._models = tuple(_read_size(name, model, workspace, fetches_ahead) for name, model in models.items())
        self._never_streamed = tuple(
            name
            for name, model in models.items()
            # On the CPU, layers are not streamed: the operating system reads the mapped weights on demand.
            if not is_host and (name in read_never_offloaded(pipe) or not supports_streaming(model))
        )

    def __call__(self, savings: MemorySavings, images: int, images_per_call: int | None = None, /) -> Footprint:
        """Return the memory footprint of a call that generates `images` images.

        `savings` selects techniques that reduce activation memory, such as VAE tiling. The models run at most
        `images_per_call` images at a time. Footprints are cached.
        """
        key = savings, images, None if images_per_call is None or images_per_call >= images else images_per_call
        if key not in self._footprints:
            self._footprints[key] = self._measure(*key)
        return self._footprints[key]

    def of_another_call(
        self, arguments: Callable[[int], Mapping[str, Any]], size: tuple[int, int] | None
    ) -> Measurement:
        """Return a measurement of the same pipeline with different call arguments and a different image size."""
        # A shallow copy shares the trace, and with it the cached model calls.
        other = copy.copy(self)
        other.arguments, other.size, other.trace_facts, other._footprints = arguments, size, TraceFacts(), {}
        return other

    def _measure(self, savings: MemorySavings, images: int, images_per_call: int | None) -> Footprint:
        set_vae_tiling(self.pipe, savings.vae_in_parts)
        first = not self._footprints
        attention = replace(self.attention, heads="max") if savings.sliced_attention else self.attention
        setting = savings.vae_in_parts, images_per_call and (images, images_per_call)
        with self.split_rows(images, images_per_call):
            result = self.traced.run(self.pipe, self.arguments(images), self.workspace, attention, setting)
        if first:
            self.trace_facts, self.output = self.traced.trace_facts, read_output(result)
        return Footprint(
            pipeline=type(self.pipe).__name__,
            dtype=str(self.pipe.dtype).removeprefix("torch."),
            size=self.size,
            images=images,
            models=self._models,
            model_calls=self._read_model_calls(),
            offload_order=read_offload_order(self.pipe),
            never_offloaded=self.never_offloaded,
            never_streamed=self._never_streamed,
            fixed_bytes=self.workspace.fixed_bytes,
            **_read_loops(self.pipe),
        )

    def _read_model_calls(self) -> tuple[ModelCall, ...]:
        """Return the recorded model calls with their phases: encode, denoise or decode.

        Memory that the pipeline itself uses before or after a model call is attributed to that call.
        """
        records, between = self.traced.model_calls, self.traced.between
        steps = [position for position, record in enumerate(records) if record.component in self.denoisers]
        first, last = (steps[0], steps[-1]) if steps else (len(records), len(records))
        calls = []
        for position, record in enumerate(records):
            phase: Phase = "encode" if position < first else "decode"
            # A model that runs between the steps (ControlNet) is part of denoising; a preview decoder is not.
            if record.component in self.denoisers or (first <= position <= last and record.method != "decode"):
                phase = "denoise"
            held = max(record.held_bytes, between[position], between[position + 1])
            calls.append(ModelCall(record.component, phase, held, record.work))
        return tuple(calls)


def _read_loops(pipe: Any) -> dict[str, int]:
    """Return the iterations of the denoising loop in the traced call, and those of each additional step."""
    scheduler = getattr(pipe, "scheduler", None)
    timesteps, order = getattr(scheduler, "timesteps", None), getattr(scheduler, "order", 1)
    if not isinstance(timesteps, torch.Tensor) or not isinstance(order, int):
        return {}
    return {"loops": len(timesteps), "loops_per_step": order} if len(timesteps) <= _MOST_LOOPS else {}


def set_vae_tiling(pipe: Any, on: bool) -> None:
    """Enable slicing and tiling for the pipeline's VAE, or disable what an earlier call enabled.

    Slicing and tiling that the user enabled stay enabled.
    """
    for component in pipe.components.values():
        if isinstance(component, torch.nn.Module):
            enabled = vars(component).setdefault(_ENABLED_ATTRIBUTE, set()) if on else _pop_enabled(component)
            for enable, disable in _TILING_METHODS.items():
                _switch(component, enable, disable, on, enabled)


def _pop_enabled(component: torch.nn.Module) -> set[str]:
    enabled: set[str] = vars(component).pop(_ENABLED_ATTRIBUTE, set())
    return enabled


def _switch(component: Any, enable: str, disable: str, on: bool, enabled: set[str]) -> None:
    if enable == "enable_slicing" and find_slicing_obstacle(component):
        return
    method = getattr(component, enable if on else disable, None)
    # diffusers stores the state as `use_slicing` and `use_tiling`.
    is_on = bool(getattr(component, enable.replace("enable", "use"), False))
    if callable(method) and (is_on is not on) and (on or enable in enabled):
        try:
            method()
        except NotImplementedError:  # of diffusers, for autoencoders without tiling, such as that of LTX-2's audio
            return
        enabled.add(enable)


def supports_streaming(model: torch.nn.Module) -> bool:
    """Return whether a model's weights can be moved to the device layer by layer during a call.

    The model must support group offloading, and no hook may compute a weight before a layer's forward
    method.
    """
    computed = (_COMPUTED.isdisjoint(read_parameter_table(layer)) for layer in model.modules())
    return supports_group_offloading(model) and all(computed)


def _read_size(name: str, model: torch.nn.Module, workspace: Workspace, fetches_ahead: bool) -> ModelSize:
    """Return a model's parameter count and the sizes of its weights in bytes.

    `weights_bytes` is the size of all weights, and `layer_bytes` is the peak if layers are loaded one
    at a time. Tied weights count once.
    """

    def sum_bytes(tensors: Any) -> int:
        return sum(workspace.round_up_bytes(tensor.numel() * tensor.element_size()) for tensor in tensors)

    ahead = _find_next_layer(model, sum_bytes) if fetches_ahead else 0
    return ModelSize(
        name=name,
        kind=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        weights_bytes=sum_bytes((*model.parameters(), *model.buffers())),
        layer_bytes=_find_largest_layer(model, sum_bytes) + ahead,
    )


def _find_largest_layer(model: torch.nn.Module, sum_bytes: Callable[[Any], int]) -> int:
    """Return the peak bytes of weights if only the running module and its parents are on the device."""
    own = sum_bytes(_list_own_tensors(model))
    return own + max((_find_largest_layer(child, sum_bytes) for child in model.children()), default=0)


def _find_next_layer(model: torch.nn.Module, sum_bytes: Callable[[Any], int]) -> int:
    """Return the maximum number of bytes needed to prefetch the weights of the next module."""
    return max(sum_bytes(_list_own_tensors(module)) for module in model.modules())


def _list_own_tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return the parameters and buffers that are streamed with a module, with those in its parameter containers."""
    containers = [child for child in module.children() if isinstance(child, _PARAMETER_CONTAINERS)]
    owners = (module, *containers)
    return [tensor for owner in owners for tensor in (*owner.parameters(recurse=False), *owner.buffers(recurse=False))]
