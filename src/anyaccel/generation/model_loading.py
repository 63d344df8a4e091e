"""Model loading, with a cache for the most recent model."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from anyaccel.backends.cpu_half_precision_speed import SLOWDOWN_LIMIT, measure_half_precision
from anyaccel.backends.device import OpenDevice, find_device
from anyaccel.errors import UsageError
from anyaccel.generation.adapters import Additions, apply_ip_adapters, apply_loras, load_controlnets
from anyaccel.generation.model_name import ResolvedModel, find_revision
from anyaccel.generation.schedulers import make_scheduler
from anyaccel.planning.decision import Decision
from anyaccel.planning.dtype import choose_dtype
from anyaccel.planning.facts import PipelineFacts
from anyaccel.planning.options import PlacementOptions
from anyaccel.processes.gc_control import gc_paused, release_unreachable
from anyaccel.runtime.placement.place import resolve_device

if TYPE_CHECKING:
    from anyaccel.generation.request import GenerationRequest
    from anyaccel.progress import ProgressListener

__all__ = [
    "LOCK",
    "LoadedModel",
    "change_additions",
    "load_model",
    "load_uncached",
    "open_requested_device",
    "release_model",
]

# Held while the cached model is replaced or generates images.
LOCK = threading.RLock()


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A pipeline that has been loaded and placed on its device, with its model name and revision."""

    pipe: Any
    model: ResolvedModel
    revision: str | None
    load_s: float
    """Seconds to load and place the model; 0 if it came from the cache."""
    additions: Additions = field(default_factory=Additions)
    """LoRAs, IP-Adapters, ControlNets and the scheduler that were added to the pipeline."""
    scheduler: Any = None
    """The model's own scheduler; None if it has none."""
    controlnet: Any = None
    """The loaded ControlNet, or a list of several ones, with which the pipeline for a call is created."""
    derived: dict[type, Any] = field(default_factory=dict)
    """Pipelines for other tasks with the same components, by class."""


# At most one entry: two models may not fit into memory together.
_CACHE: dict[tuple[object, ...], LoadedModel] = {}


def open_requested_device(request: GenerationRequest) -> GenerationRequest:
    """Return a request with its device opened; raise an error if the device is not available."""
    # Before the pipeline class is read, because that imports diffusers, which takes seconds.
    return replace(request, device=resolve_device(request.device, PlacementOptions(dtype=request.dtype)))


def load_model(request: GenerationRequest, listener: ProgressListener | None = None) -> LoadedModel:
    """Return the model for a request, loaded onto its device; reuse the cached model if it matches.

    Only one model is cached; it is released before another one is loaded.
    """
    model = request.model
    with LOCK:
        # First, because an unavailable device must be reported before diffusers is imported, which takes seconds.
        opened = resolve_device(request.device, PlacementOptions(dtype=request.dtype))
        fallback = _choose_virtual_dtype(opened, request.dtype)
        placement_options = PlacementOptions(
            dtype=fallback.value if fallback else request.dtype, speed=request.speed, weights=request.weights
        )
        # A folder may have changed since the last call. The commit of a hub model is known only after loading.
        digest = None if model.kind == "hub" else find_revision(model)
        key = (model, digest, opened.sheet.name, opened.index, placement_options)
        cached = _CACHE.get(key)
        if cached is not None and not _needs_reload(cached, request.additions):
            cached = replace(cached, load_s=0.0)
        else:
            cached = None
            release_model()  # before loading, because both models may not fit into memory
            start = time.perf_counter()
            pipe = _load_pipeline(model, opened, placement_options, fallback, listener)
            seconds = time.perf_counter() - start
            cached = _make_loaded(pipe, model, digest or find_revision(model), seconds)
        # Removed until the additions are complete: an error may leave some of them in the models.
        _CACHE.pop(key, None)
        _CACHE[key] = _change_additions(cached, request.additions)
        return _CACHE[key]


def load_uncached(
    request: GenerationRequest, placement_options: PlacementOptions, listener: ProgressListener | None = None
) -> LoadedModel:
    """Load the model for a request onto its device without using the model cache.

    The dtype, the speed level and the format of the weights come from `placement_options`, not from the request.
    """
    opened = resolve_device(request.device, placement_options)
    fallback = _choose_virtual_dtype(opened, placement_options.dtype)
    placement_options = replace(placement_options, dtype=fallback.value) if fallback else placement_options
    start = time.perf_counter()
    pipe = _load_pipeline(request.model, opened, placement_options, fallback, listener)
    seconds = time.perf_counter() - start
    loaded = _make_loaded(pipe, request.model, find_revision(request.model), seconds)
    return _change_additions(loaded, request.additions)


def _make_loaded(pipe: Any, model: ResolvedModel, revision: str | None, load_s: float) -> LoadedModel:
    scheduler = getattr(pipe, "scheduler", None)
    return LoadedModel(pipe=pipe, model=model, revision=revision, load_s=load_s, scheduler=scheduler)


def change_additions(loaded: LoadedModel, additions: Additions) -> LoadedModel | None:
    """Return an uncached model with other LoRAs, IP-Adapters, ControlNets and another scheduler.

    Return None if the model must be loaded again. After an error, the model is not usable.
    """
    return None if _needs_reload(loaded, additions) else _change_additions(loaded, additions)


def _needs_reload(loaded: LoadedModel, additions: Additions) -> bool:
    """Return whether a loaded model has an IP-Adapter that a request does not have."""
    # Unloading one also removes the image encoder of the model (diffusers 0.42).
    return bool(loaded.additions.ip_adapters) and loaded.additions.ip_adapters != additions.ip_adapters


def _change_additions(loaded: LoadedModel, additions: Additions) -> LoadedModel:
    """Return the loaded model with other LoRAs, IP-Adapters, ControlNets and another scheduler."""
    before, pipe, controlnet = loaded.additions, loaded.pipe, loaded.controlnet
    if before == additions:
        return loaded
    if before.scheduler != additions.scheduler:
        if loaded.scheduler is None:
            raise UsageError(f"{type(pipe).__name__} has no scheduler to replace", hint="omit --scheduler")
        own = additions.scheduler is None
        pipe.scheduler = loaded.scheduler if own else make_scheduler(str(additions.scheduler), loaded.scheduler)
    if before.loras != additions.loras:
        if before.loras:
            pipe.unload_lora_weights()
        if additions.loras:
            apply_loras(pipe, additions.loras)
    if before.ip_adapters != additions.ip_adapters:
        apply_ip_adapters(pipe, additions.ip_adapters)
    if before.controlnets != additions.controlnets:
        controlnet = load_controlnets(pipe, additions.controlnets) if additions.controlnets else None
    return replace(loaded, additions=additions, controlnet=controlnet, derived={})


def release_model() -> None:
    """Remove the model from the cache and free its memory; do nothing if the cache is empty."""
    with LOCK:
        if _CACHE:
            _CACHE.clear()
            release_unreachable()  # models and their hooks form reference cycles


def _choose_virtual_dtype(opened: OpenDevice, dtype: str | None) -> Decision[str] | None:
    """Return float32 if a virtual device's half-precision dtype is very slow on this CPU, else None.

    A virtual device is emulated on the CPU. The limit is 4 times the run time of float32. Also return
    None if the user requested a dtype or the device is real.
    """
    if dtype is not None or not find_device(opened.sheet.name).virtual:
        return None
    preferred = choose_dtype(opened.sheet, PipelineFacts(pipeline=""), PlacementOptions()).value
    slowdown = measure_half_precision().get(preferred, 1.0)
    if slowdown <= SLOWDOWN_LIMIT:
        return None
    reason = f"a virtual device runs on the CPU, where {preferred} takes {slowdown:.0f} times as long as float32"
    return Decision("float32", reason)


def _load_pipeline(
    model: ResolvedModel,
    opened: OpenDevice,
    placement_options: PlacementOptions,
    fallback: Decision[str] | None,
    listener: ProgressListener | None,
) -> Any:
    """Load a diffusers pipeline in the chosen dtype and place it on the device.

    `fallback` overrides the dtype choice unless it is None. The listener is notified of each loaded
    component.
    """
    options: dict[str, Any] = {} if model.revision is None else {"revision": model.revision}
    with gc_paused():
        import diffusers

        from anyaccel.generation.progress import counting_components
        from anyaccel.runtime.pipeline import load_onto
        from anyaccel.upstream.modular_blocks import configure_progress_bars

        with counting_components(listener):
            pipe = load_onto(diffusers.DiffusionPipeline, model.source, options, opened, placement_options, fallback)
    # disable=None lets tqdm show a bar on a terminal and in a notebook, but not in a log file.
    configure_progress_bars(pipe, disable=None)
    return pipe
