"""One run of a pipeline with shapes alone: which model runs when, and what is held at its peak."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from anyaccel.planning.attention import AS_IT_IS, AttentionRule
from anyaccel.planning.kernel_workspace import Workspace
from anyaccel.planning.limit_hits import TraceFacts
from anyaccel.tracing.allocation_tracker import AllocationTracker
from anyaccel.tracing.meta_module import WATCHED_BYTES, first_floating, map_tensors, to_meta_module

__all__ = ["ModelCallRecord", "PipelineTrace"]


@dataclass(frozen=True)
class ModelCallRecord:
    """One call of one model."""

    component: str
    method: str
    """`forward`, `encode`, `decode`."""
    held_bytes: int
    """At its peak, with all that the pipeline keeps besides; without weights."""


class PipelineTrace:
    """Runs a pipeline whose models are shells, and tells what was held."""

    def __init__(self) -> None:
        self.passings: list[ModelCallRecord] = []
        self.between: list[int] = []
        """The peaks of what the pipeline itself does before, between and after its models."""
        self._tracker = AllocationTracker(Workspace(), ())
        self._setting: Hashable = None
        self._weights: list[torch.Tensor] = []
        """Of the one pipeline whose models are shells here."""
        self._watched: dict[str, torch.Tensor] = {}
        self._known: dict[Any, tuple[Any, int]] = {}

    @property
    def seen(self) -> TraceFacts:
        """What the last run did inside the models; of what was answered from memory, nothing."""
        return self._tracker.seen

    def shell(self, name: str, model: torch.nn.Module) -> torch.nn.Module:
        """A model on `meta` as a shell that is run here."""
        return to_meta_module(model, name, self)

    def run(
        self,
        pipe: Any,
        arguments: Mapping[str, Any],
        workspace: Workspace,
        attention: AttentionRule = AS_IT_IS,
        setting: Hashable = None,
    ) -> None:
        """Call the pipeline once; `setting` says what models depend on besides."""
        if not self._weights:
            models = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
            self._weights = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
        self._tracker = AllocationTracker(workspace, self._weights, attention)
        self._setting = (workspace, attention, setting)
        self.passings, self.between, self._watched = [], [], {}
        with torch.no_grad(), torch.random.fork_rng(devices=[]), self._tracker.running():
            pipe(**arguments)
        self.between.append(self._tracker.take_peak())

    def run_model(self, name: str, method: str, call: Any, args: Any, kwargs: Any) -> Any:
        """One call of one model; one with the same shapes as before is answered from memory."""
        tracker = self._tracker
        tracker.model = name
        self.between.append(tracker.take_peak())
        before = tracker.used
        key = (self._setting, name, method, repr(map_tensors((args, kwargs), _describe)))
        known = self._known.get(key)
        if known is None:
            made = call(*map_tensors(args, self._to_meta), **map_tensors(kwargs, self._to_meta))
            peak = tracker.take_peak()
            self._known[key] = (map_tensors(made, self._to_meta), peak - before)
        else:
            made, peak = known[0], before + known[1]
        self.passings.append(ModelCallRecord(name, method, peak))
        given = map_tensors(made, self._to_host)
        self._watch(name, first_floating(given))
        return given

    def _watch(self, name: str, tensor: torch.Tensor | None) -> None:
        """Keep what a model gave last, as the watch over a call does."""
        if tensor is not None and tensor.numel() * tensor.element_size() <= WATCHED_BYTES:
            self._watched[name] = tensor

    def run_part(self, name: str, call: Any, args: Any, kwargs: Any) -> Any:
        """One call of a part that a model runs many times with the same shapes: a tile of a picture after another.

        What keeps a list for the next call, as autoencoders of video do, runs every time.
        """
        if any(isinstance(value, list | dict) and value for value in (*args, *kwargs.values())):
            return call(*args, **kwargs)
        key = (self._setting, name, repr(map_tensors((args, kwargs), _describe)))
        known = self._known.get(key)
        if known is None:
            made, above = self._tracker.pass_by_again(lambda: call(*args, **kwargs))
            self._known[key] = (map_tensors(made, self._to_meta), above)
            return made
        self._tracker.pass_by(known[1])
        return map_tensors(known[0], torch.empty_like)

    def _to_meta(self, tensor: torch.Tensor) -> torch.Tensor:
        """The shape alone; the tensor of the host goes on counting for it."""
        with self._tracker.paused():
            shape = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        self._tracker.ignore(shape)
        return shape

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Zeros of that shape, which count from now on in the place of the shape."""
        with self._tracker.paused():
            zeros = torch.zeros(tensor.shape, dtype=tensor.dtype)
        self._tracker.add(zeros, in_place_of_another=True)
        return zeros


def _describe(tensor: torch.Tensor) -> Any:
    return tensor.dtype, tuple(tensor.shape), tensor.stride()
