"""Loading a model onto a device, and keeping the last one, so that a second picture need not load it again."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from anyaccel.backends.device import OpenDevice, find_device
from anyaccel.backends.half_precision_probe import measure_half_precision
from anyaccel.generation.model_name import ResolvedModel, find_revision
from anyaccel.planning.decision import Decision
from anyaccel.planning.dtype import HALF_PRECISIONS, choose_dtype
from anyaccel.planning.facts import PipelineFacts
from anyaccel.planning.options import PlacementOptions
from anyaccel.processes.gc_control import gc_paused, release_unreachable
from anyaccel.runtime.placement.place import resolve_device
from anyaccel.runtime.placement_state import store_options

if TYPE_CHECKING:
    from anyaccel.generation.request import GenerationRequest
    from anyaccel.progress import ProgressListener

__all__ = ["LOCK", "LoadedModel", "load_model", "load_uncached", "release_model"]

_MUCH_SLOWER = 4
"""So many times float32's time are too many to wait for on a virtual device."""
LOCK = threading.RLock()
"""Held while the kept model is exchanged or makes a picture."""


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model on its device."""

    pipe: Any
    model: ResolvedModel
    revision: str | None
    load_s: float
    """How long loading and placing took; 0 where it was kept from the last time."""


_KEPT: dict[tuple[object, ...], LoadedModel] = {}


def load_model(order: GenerationRequest, listener: ProgressListener | None = None) -> LoadedModel:
    """Load an order's model onto its device, or take the one that is kept; another one is let go first."""
    model = order.model
    with LOCK:
        # That the device is not here is said before diffusers is imported, which takes seconds.
        opened = resolve_device(order.device, PlacementOptions(dtype=order.dtype))
        spared = _spare_host(opened, order.dtype)
        placement_options = PlacementOptions(dtype=spared.value if spared else order.dtype, speed=order.speed)
        digest = None if model.kind == "hub" else find_revision(model)  # a folder may have changed since the last time
        key = (model, digest, opened.sheet.name, opened.index, placement_options)
        kept = _KEPT.get(key)
        if kept is not None:
            return replace(kept, load_s=0.0)
        release_model()
        start = time.perf_counter()
        pipe = _load(model, opened, placement_options, spared, listener)
        seconds = time.perf_counter() - start
        _KEPT[key] = LoadedModel(pipe=pipe, model=model, revision=digest or find_revision(model), load_s=seconds)
        return _KEPT[key]


def load_uncached(
    order: GenerationRequest, placement_options: PlacementOptions, listener: ProgressListener | None = None
) -> LoadedModel:
    """Load an order's model onto its device, for one who keeps it himself; his wishes come before the order's."""
    opened = resolve_device(order.device, placement_options)
    spared = _spare_host(opened, placement_options.dtype)
    placement_options = replace(placement_options, dtype=spared.value) if spared else placement_options
    start = time.perf_counter()
    pipe = _load(order.model, opened, placement_options, spared, listener)
    seconds = time.perf_counter() - start
    return LoadedModel(pipe=pipe, model=order.model, revision=find_revision(order.model), load_s=seconds)


def release_model() -> None:
    """Let go of the model that is kept, and of its memory."""
    with LOCK:
        if _KEPT:
            _KEPT.clear()
            release_unreachable()  # hooks and their models hold one another


def _spare_host(opened: OpenDevice, asked: str | None) -> Decision[str] | None:
    """float32, where a virtual device would take a half precision in which the host is far slower."""
    if asked is not None or not find_device(opened.sheet.name).virtual:
        return None
    best = choose_dtype(opened.sheet, PipelineFacts(pipeline=""), PlacementOptions()).value
    times = measure_half_precision().get(best, 1.0)
    if times <= _MUCH_SLOWER:
        return None
    reason = f"virtual: the device would take {best}, which this host computes {times:.0f} times slower than float32"
    return Decision("float32", reason)


def _load(
    model: ResolvedModel,
    opened: OpenDevice,
    placement_options: PlacementOptions,
    spared: Decision[str] | None,
    listener: ProgressListener | None,
) -> Any:
    """A pipeline on its device, read in the type that it will run in: half of the memory for half precision."""
    chosen = spared or choose_dtype(opened.sheet, PipelineFacts(pipeline=""), placement_options)
    options: dict[str, Any] = {} if model.revision is None else {"revision": model.revision}
    if placement_options.dtype is not None or chosen.value in HALF_PRECISIONS:
        options["dtype"] = chosen.value
    with gc_paused():
        from anyaccel.generation.progress import counting_components
        from anyaccel.runtime.pipeline import DiffusionPipeline

        with counting_components(listener):
            pipe = DiffusionPipeline.from_pretrained(model.source, **options)
    store_options(pipe, placement_options)
    decided = chosen if spared or chosen.value in HALF_PRECISIONS else None
    pipe.place_with_plan(opened, {}, decided)
    # None: a bar on a terminal and in a notebook, and none in a log.
    pipe.set_progress_bar_config(disable=None)
    return pipe
