"""One pipeline for many requests: each call runs in a light copy of its own, and the copies' models are the same."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from anyaccel.backends.torch_device import is_host
from anyaccel.forward_overrides import Slot, get_override, remove_override, set_override
from anyaccel.runtime.introspection import find_components, find_models
from anyaccel.runtime.placement_state import Placement, find_placement, keep_placement
from anyaccel.runtime.speed.graph_capture import GraphCapture
from anyaccel.runtime.workarounds.nan_check import Mark
from anyaccel.server.batching.batched_args import CallArgs
from anyaccel.server.batching.step_batcher import BatchedForward, StepBatcher

__all__ = ["SharedPipeline"]

_MOST_CALLS = 8


class SharedPipeline:
    """A placed pipeline whose calls may come from several threads at once, and are joined where that is right."""

    def __init__(self, pipe: Any, *, most_calls: int = _MOST_CALLS, patience_s: float | None = None) -> None:
        self.pipe = pipe
        placement = find_placement(pipe)
        exact = placement is not None and placement.opened.driver.marks
        self.rendezvous = StepBatcher(
            most_calls=most_calls, patience_s=patience_s, mark=_find_mark(placement), exact=exact
        )
        denoisers = placement.denoisers if placement is not None else ()
        self.meetings = {name: self._put(module, name in denoisers) for name, module in _list_meeting_places(pipe)}

    def run(self, call: Mapping[str, Any], copied: Any = None) -> Any:
        """What the pipeline makes of a call; the picture is the one that it would make if nobody else called.

        The call runs in a light copy of its own: one that the caller made, of this pipeline or of another one of the
        same models, or a new one.
        """
        with self.rendezvous.taking_part():
            return (light_copy(self.pipe) if copied is None else copied)(**call)

    def warm_up(self, first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, bool]:
        """Run two calls, and find out which models give joined what they give alone; only those are joined."""
        seen: dict[str, list[CallArgs]] = {name: [] for name in self.meetings}
        with self._listening(seen):
            for call in (first, second):
                self.run(call)
        placement = find_placement(self.pipe)
        reliable = placement is None or placement.plan.images_per_call.value != 1  # batches are right on this device
        for name, meeting in self.meetings.items():
            meeting.joins = reliable and meeting.try_out(seen[name])
            meeting.example = seen[name][0] if seen[name] and meeting.joins else None
        return {name: meeting.joins for name, meeting in self.meetings.items()}

    def allow(self, joins: Mapping[str, bool]) -> None:
        """Say which models run several calls as one."""
        for name, meeting in self.meetings.items():
            meeting.joins = joins[name]

    def prepare_rows(self, calls: int) -> None:
        """Where every shape is a graph of its own: run rounds of 1, 2, 4 … calls, and fill later ones up to these."""
        sizes = [1]
        while sizes[-1] < calls:
            sizes.append(min(calls, 2 * sizes[-1]))
        for meeting in self.meetings.values():
            if meeting.example is not None:
                meeting.prepare_rows(sizes)

    @contextmanager
    def _listening(self, seen: dict[str, list[CallArgs]]) -> Iterator[None]:
        """While the block runs: no call is joined, and the arguments of each call's first run of a model are kept."""
        for name, meeting in self.meetings.items():
            meeting.joins, meeting.heard = False, seen[name]
        try:
            yield
        finally:
            for meeting in self.meetings.values():
                meeting.heard = None

    def close(self) -> None:
        """Let the models run as before."""
        for meeting in self.meetings.values():
            remove_override(meeting.module, Slot.BATCHING)

    def renew(self) -> None:
        """Nobody is inside, and the models may be others: what was recorded of them before holds no longer."""
        for meeting in self.meetings.values():
            capture = get_override(meeting.module, Slot.CAPTURE)
            if isinstance(capture, GraphCapture):
                capture.begin_call()

    def _put(self, module: torch.nn.Module, steps: bool) -> BatchedForward:
        meeting = BatchedForward(module, self.rendezvous, joins=False, steps=steps)
        set_override(module, Slot.BATCHING, meeting)
        return meeting


def _find_mark(placement: Placement | None) -> Mark | None:
    """What marks how far the device was asked; None on the host, which has done all when a call returns."""
    if placement is None or is_host(placement.opened.torch_device):
        return None
    return functools.partial(placement.opened.driver.record_event, placement.opened.index)


def _list_meeting_places(pipe: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    """Where calls meet: at every model, and at what decodes inside an autoencoder, whose own forward nobody calls."""
    for name, model in find_models(pipe).items():
        decoder = getattr(model, "decoder", None)
        if hasattr(model, "decode") and isinstance(decoder, torch.nn.Module):
            yield f"{name}.decoder", decoder
        elif not hasattr(model, "generate"):  # a language model that writes calls itself, as often as it likes
            yield name, model


def light_copy(pipe: Any) -> Any:
    """A pipeline with the same models and all else its own: schedulers and tokenizers change as they are used."""
    other = object.__new__(type(pipe))
    vars(other).update(vars(pipe))
    for name, part in find_components(pipe).items():
        if not isinstance(part, torch.nn.Module):
            vars(other)[name] = copy.deepcopy(part)
    placement = find_placement(pipe)
    if placement is not None:
        keep_placement(other, _copy_placement(placement))
    return other


def _copy_placement(placement: Placement) -> Placement:
    return replace(placement, lock=threading.RLock(), running=False, progress=None, shared=True)
