"""The footprint of a call: a pipeline of shells, run once for each way and number of images that is asked about."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from anyaccel.planning.attention import AttentionRule
from anyaccel.planning.footprint import Footprint, MemorySavings, ModelCall, ModelSize, Phase
from anyaccel.planning.kernel_workspace import Workspace
from anyaccel.planning.limit_hits import TraceFacts
from anyaccel.tracing.pipeline_trace import PipelineTrace
from anyaccel.upstream.diffusers_internals import read_never_offloaded, supports_group_offloading
from anyaccel.upstream.torch_internals import read_parameter_table

__all__ = ["Measurement", "set_parts", "supports_streaming"]

_COMPUTED = {"weight_g", "weight_orig"}
"""Parameters that a hook of torch's makes a weight of before the forward that streaming wraps."""
_PARTS = {"enable_slicing": "disable_slicing", "enable_tiling": "disable_tiling"}


class Measurement:
    """Measures calls of one pipeline with one set of arguments; each answer is worked out once."""

    def __init__(
        self,
        pipe: Any,
        traced: PipelineTrace,
        workspace: Workspace,
        *,
        denoisers: Collection[str],
        arguments: Callable[[int], Mapping[str, Any]],
        attention: AttentionRule,
        size: tuple[int, int] | None = None,
        unified_memory: bool = False,
        fetches_ahead: bool = False,
    ) -> None:
        self.pipe, self.traced, self.workspace = pipe, traced, workspace
        self.denoisers, self.arguments, self.attention = denoisers, arguments, attention
        self.size = size
        self.always_there = () if unified_memory else read_never_offloaded(pipe)
        self.seen = TraceFacts()
        """What the first run did inside the models."""
        self._known: dict[tuple[MemorySavings, int], Footprint] = {}
        models = {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
        self._models = tuple(_read_size(name, part, workspace, fetches_ahead) for name, part in models.items())
        self._never_streamed = tuple(
            name for name, part in models.items() if not (unified_memory or supports_streaming(part))
        )

    def __call__(self, way: MemorySavings, images: int) -> Footprint:
        """The footprint of a call made in one way, for so many images at once."""
        if (way, images) not in self._known:
            self._known[way, images] = self._measure(way, images)
        return self._known[way, images]

    def of_another_call(
        self, arguments: Callable[[int], Mapping[str, Any]], size: tuple[int, int] | None
    ) -> Measurement:
        """The same for other arguments."""
        other = copy.copy(self)
        other.arguments, other.size, other.seen, other._known = arguments, size, TraceFacts(), {}
        return other

    def _measure(self, way: MemorySavings, images: int) -> Footprint:
        set_parts(self.pipe, way.vae_in_parts)
        first = not self._known
        attention = replace(self.attention, heads="max") if way.sliced_attention else self.attention
        self.traced.run(self.pipe, self.arguments(images), self.workspace, attention, setting=way.vae_in_parts)
        if first:
            self.seen = self.traced.seen
        order = str(getattr(self.pipe, "model_cpu_offload_seq", None) or "").split("->")
        return Footprint(
            pipeline=type(self.pipe).__name__,
            dtype=str(self.pipe.dtype).removeprefix("torch."),
            size=self.size,
            images=images,
            models=self._models,
            passings=self._read_passings(),
            offload_order=tuple(name for name in order if name),
            always_there=self.always_there,
            never_streamed=self._never_streamed,
            fixed_bytes=self.workspace.fixed_bytes,
        )

    def _read_passings(self) -> tuple[ModelCall, ...]:
        """Each model's calls with their phases; what the pipeline does before and after one counts to it."""
        heard, between = self.traced.passings, self.traced.between
        steps = [place for place, one in enumerate(heard) if one.component in self.denoisers]
        first, last = (steps[0], steps[-1]) if steps else (len(heard), len(heard))
        passings = []
        for place, one in enumerate(heard):
            phase: Phase = "encode" if place < first else "decode"
            if one.component in self.denoisers or (first <= place <= last and one.method != "decode"):
                phase = "denoise"
            held = max(one.held_bytes, between[place], between[place + 1])
            passings.append(ModelCall(one.component, phase, held))
        return tuple(passings)


def set_parts(pipe: Any, on: bool) -> None:
    """Let the autoencoder take its pictures one by one and in tiles, or whole."""
    for part in pipe.components.values():
        for enable, disable in _PARTS.items():
            switch = getattr(part, enable if on else disable, None)
            if isinstance(part, torch.nn.Module) and callable(switch):
                switch()


def supports_streaming(model: torch.nn.Module) -> bool:
    """Return whether each weight of a model is read only in the forward of the layer that has it."""
    computed = (_COMPUTED.isdisjoint(read_parameter_table(layer)) for layer in model.modules())
    return supports_group_offloading(model) and all(computed)


def _read_size(name: str, model: torch.nn.Module, workspace: Workspace, fetches_ahead: bool) -> ModelSize:
    """The sizes of a model's weights, tied ones once."""

    def take(tensors: Any) -> int:
        return sum(workspace.of_block(tensor.numel() * tensor.element_size()) for tensor in tensors)

    buffers = take(model.buffers())
    ahead = _find_next_layer(model, take) if fetches_ahead else 0
    return ModelSize(
        name=name,
        kind=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        weights_bytes=take(model.parameters()) + buffers,
        layer_bytes=_find_largest_layer(model, take) + buffers + ahead,
    )


def _find_largest_layer(model: torch.nn.Module, take: Callable[[Any], int]) -> int:
    """The most that is there at once where each module brings its own parameters: its own and its parents'."""
    own = take(model.parameters(recurse=False))
    return own + max((_find_largest_layer(child, take) for child in model.children()), default=0)


def _find_next_layer(model: torch.nn.Module, take: Callable[[Any], int]) -> int:
    """The most that is fetched ahead: the parameters of one module."""
    return max(take(module.parameters(recurse=False)) for module in model.modules())
