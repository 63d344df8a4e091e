"""Tracer that runs a pipeline on `meta` and records the order and peak memory of its model calls."""

from __future__ import annotations

import functools
import random
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

from anyaccel.planning.attention import UNCHANGED_ATTENTION, AttentionRule
from anyaccel.planning.footprint import Work
from anyaccel.planning.kernel_workspace import Workspace
from anyaccel.planning.limit_hits import TraceFacts
from anyaccel.tracing.allocation_tracker import AllocationTracker
from anyaccel.tracing.meta_module import MAX_KEPT_OUTPUT_BYTES, first_floating, map_tensors, to_meta_module
from anyaccel.tracing.meta_operations import make_zeros
from anyaccel.upstream.torch_internals import skip_function_modes

__all__ = ["ModelCallRecord", "PipelineTrace"]

_UNCHANGED = object()
_MOST_CPU_ELEMENTS = 2**26


@dataclass(frozen=True)
class ModelCallRecord:
    """Record of one model call: component, method and peak memory."""

    component: str
    method: str
    """`forward`, `encode`, `decode`."""
    held_bytes: int
    """Peak memory during the call, without weights, including what the pipeline holds."""
    work: Work = field(default_factory=Work)


class PipelineTrace:
    """Tracer that runs a pipeline with models on `meta` and records the memory use of each model call."""

    def __init__(self) -> None:
        self.model_calls: list[ModelCallRecord] = []
        self.between: list[int] = []
        """Peaks of the pipeline's own work before, between and after the model calls."""
        self.not_included: dict[str, Mapping[int, int]] = {}
        """Models whose memory is not counted: tiny ones that replace models of unknown size.

        Each value maps a width of the tiny model's output to that of the model which it replaces.
        """
        self._tracker = AllocationTracker(Workspace(), ())
        self._setting: Hashable = None
        self._weights: list[torch.Tensor] = []
        """Weights of the traced pipeline."""
        self._outputs: dict[str, torch.Tensor] = {}
        # Result, peak above the memory in use and work, by setting, model, method and input
        # layouts. Denoisers run with the same layouts at every step, so only one step is traced.
        self._cache: dict[Any, tuple[Any, int, Work]] = {}

    @property
    def trace_facts(self) -> TraceFacts:
        """Dtypes, tensor sizes and operations in the last run, excluding cached model calls."""
        return self._tracker.trace_facts

    def reuse_calls(self, other: PipelineTrace, models: Collection[str]) -> None:
        """Reuse the model calls of another trace for these models, which must be the same ones in both."""
        self._cache |= {key: value for key, value in other._cache.items() if key[1].partition(".")[0] in models}

    def wrap_model(self, name: str, model: torch.nn.Module) -> torch.nn.Module:
        """Make a model on `meta` callable with CPU tensors, and record its calls in this trace."""
        return to_meta_module(model, name, self)

    def wrap_replacement(self, name: str, tiny: torch.nn.Module, widths: Mapping[int, int]) -> torch.nn.Module:
        """Return a tiny model that runs instead of a model of unknown size. Its memory is not counted."""
        self.not_included[name] = widths
        return to_meta_module(tiny.to("meta"), name, self)

    def run(
        self,
        pipe: Any,
        arguments: Mapping[str, Any],
        workspace: Workspace,
        attention: AttentionRule = UNCHANGED_ATTENTION,
        setting: Hashable = None,
    ) -> Any:
        """Call the pipeline once with `arguments`, record its model calls, and return its result.

        `setting` identifies options that affect the models, and is part of the cache key for model calls.
        """
        if not self._weights:
            models = [model for model in pipe.components.values() if isinstance(model, torch.nn.Module)]
            self._weights = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
        self._tracker = AllocationTracker(workspace, self._weights, attention)
        self._setting = (workspace, attention, setting)
        self.model_calls, self.between, self._outputs = [], [], {}
        with torch.no_grad(), _restore_random_states(), self._tracker.running():
            result = pipe(**arguments)
        self.between.append(self._tracker.take_peak())
        return result

    def run_model(self, name: str, method: str, call: Any, args: Any, kwargs: Any) -> Any:
        """Run one model call, or reuse the cached result of a call with the same input shapes."""
        tracker = self._tracker
        tracker.model = name
        if name in self.not_included:
            with tracker.paused():
                result = call(*map_tensors(args, self._to_meta), **map_tensors(kwargs, self._to_meta))
                result = map_tensors(result, functools.partial(_widen, widths=self.not_included[name]))
            return map_tensors(result, functools.partial(self._to_cpu, replaces_another=False))
        self.between.append(tracker.take_peak())
        before, work = tracker.used, tracker.work
        key = (self._setting, name, method, _read_layouts((args, kwargs)))
        cached = self._cache.get(key)
        # The cached peak is relative to the memory in use, because the pipeline may hold more at the next call.
        if cached is None:
            result = call(*map_tensors(args, self._to_meta), **map_tensors(kwargs, self._to_meta))
            peak = tracker.take_peak()
            self._cache[key] = (map_tensors(result, self._to_meta), peak - before, tracker.work - work)
        else:
            result, peak = cached[0], before + cached[1]
        self.model_calls.append(ModelCallRecord(name, method, peak, self._cache[key][2]))
        output = map_tensors(result, self._to_cpu)
        self._keep_output(name, first_floating(output))
        return output

    def _keep_output(self, name: str, tensor: torch.Tensor | None) -> None:
        """Keep a model's last output in memory, as the check for NaN and Inf does in a real call."""
        if tensor is not None and tensor.numel() * tensor.element_size() <= MAX_KEPT_OUTPUT_BYTES:
            self._outputs[name] = tensor

    def run_submodule(self, name: str, call: Any, args: Any, kwargs: Any) -> Any:
        """Run one call to a submodule, or reuse the cached result of a call with the same input shapes.

        This is for submodules that run repeatedly, for example once per tile. A call may change the lists that it
        receives, as video autoencoders do.
        """
        values = (*args, *kwargs.values())
        if any(isinstance(value, dict) and value for value in values):
            return call(*args, **kwargs)
        lists = [value for value in values if isinstance(value, list)]
        key = (self._setting, name, _read_layouts((args, kwargs)))
        cached = self._cache.get(key)
        if cached is None:
            before, work = [[_weak(item) for item in items] for items in lists], self._tracker.work
            result, above = self._tracker.measure_peak(lambda: call(*args, **kwargs))
            changes = [self._read_changes(old, items) for old, items in zip(before, lists, strict=True)]
            self._cache[key] = ((map_tensors(result, self._to_meta), changes), above, self._tracker.work - work)
            return result
        (result, changes), above, work = cached
        self._tracker.count_transient(above)
        self._tracker.work += work
        for items, changed in zip(lists, changes, strict=True):
            _apply_changes(items, changed)
        return map_tensors(result, torch.empty_like)

    def _read_changes(self, before: list[Callable[[], Any]], after: list[Any]) -> list[Any]:
        """Return the items that a call assigned to a list, without data, and `_UNCHANGED` for the others."""
        old = [item() for item in before[: len(after)]] + [_UNCHANGED] * (len(after) - len(before))
        return [
            _UNCHANGED if item is previous else map_tensors(item, self._to_meta)
            for previous, item in zip(old, after, strict=True)
        ]

    def _to_meta(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a meta tensor with the layout of a given tensor.

        The meta tensor is not counted, because the given tensor is already counted.
        """
        with self._tracker.paused():
            meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        self._tracker.ignore(meta)
        return meta

    def _to_cpu(self, tensor: torch.Tensor, *, replaces_another: bool = True) -> torch.Tensor:
        """Return CPU zeros with a meta tensor's shape; the zeros are counted instead of the meta tensor.

        Very large tensors, such as decoded videos, stay on `meta`: zeros would need as much host memory as the video.
        """
        if tensor.numel() > _MOST_CPU_ELEMENTS:
            return tensor
        with self._tracker.paused():
            zeros = make_zeros(tensor.shape, tensor.dtype)
        self._tracker.add(zeros, replaces_another=replaces_another)
        return zeros


@contextmanager
def _restore_random_states() -> Iterator[None]:
    """Restore the random states at the end of the `with` block: tracing must not change the noise of later calls."""
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)


def _read_layouts(values: Any) -> str:
    """Return a text that identifies the layouts of all tensors in nested values, and the other values."""
    # Under a function mode, reading an attribute of a tensor takes ten times as long.
    with skip_function_modes():
        return repr(map_tensors(values, _read_layout))


def _read_layout(tensor: torch.Tensor) -> Any:
    return tensor.dtype, tuple(tensor.shape), tensor.stride()


def _widen(tensor: torch.Tensor, widths: Mapping[int, int]) -> torch.Tensor:
    """Return an empty tensor whose last dimension has the width that `widths` lists for it."""
    width = widths.get(tensor.shape[-1]) if tensor.dim() and tensor.is_floating_point() else None
    return tensor if width is None else tensor.new_empty((*tensor.shape[:-1], width))


def _weak(item: Any) -> Callable[[], Any]:
    """Return a function that returns an item. It does not keep a tensor alive, which would add to the peak."""
    return weakref.ref(item) if isinstance(item, torch.Tensor) else lambda: item


def _apply_changes(items: list[Any], changes: list[Any]) -> None:
    """Assign what a cached call assigned to a list. Tensors with the same layout as the new ones are kept."""
    before = items[:]
    del items[len(changes) :]
    for position, change in enumerate(changes):
        if position >= len(items):
            items.append(map_tensors(change, torch.empty_like))
        elif change is not _UNCHANGED and not _is_same_layout(before[position], change):
            items[position] = map_tensors(change, torch.empty_like)


def _is_same_layout(left: Any, right: Any) -> bool:
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return False
    with skip_function_modes():
        return bool(_read_layout(left) == _read_layout(right))
