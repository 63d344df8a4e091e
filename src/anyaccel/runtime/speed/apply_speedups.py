"""Speedups for a placed pipeline: compilation, graph capture, quantization and step skipping."""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from anyaccel.forward_overrides import Slot, get_override, remove_override, set_override
from anyaccel.library_logging import drop_log_records
from anyaccel.planning.decision import Decision
from anyaccel.planning.speedups import is_worth_compiling
from anyaccel.processes.gc_control import gc_paused, release_unreachable
from anyaccel.runtime.call_request import CallRequest, bucket_of
from anyaccel.runtime.introspection import find_denoisers, find_models
from anyaccel.runtime.module_fingerprint import LayerHooks
from anyaccel.runtime.placement_state import Placement
from anyaccel.runtime.speed.compile import compile_cache_env, compile_for_speed, has_decoder
from anyaccel.runtime.speed.compile_cache import load_payload, remove_payload, save_payload
from anyaccel.runtime.speed.compile_cache_key import make_cache_key
from anyaccel.runtime.speed.compiled_forward import find_compiled, remove_compiled_blocks
from anyaccel.runtime.speed.graph_capture import GraphCapture
from anyaccel.runtime.speed.quantize import quantize_denoisers
from anyaccel.runtime.speed.step_skipping import current_step_skipper, track_steps
from anyaccel.units import readable
from anyaccel.upstream.torch_compile_internals import CACHE_LOGGER, pause_gc_after_compile

__all__ = [
    "SpeedState",
    "apply_speedups",
    "forget_captured_graphs",
    "load_compiled",
    "remove_speedups",
    "save_compiled",
]

_LOG = logging.getLogger("anyaccel")


@dataclass
class SpeedState:
    """Compilation state of a pipeline, and the measurements used to decide when to compile it."""

    images: int = 0
    seconds: float = 0.0
    compiled: bool = False
    models: tuple[str, ...] = ()
    """The compiled models."""
    shapes: set[str] = field(default_factory=set)
    """The shapes that ran with compiled models."""
    cache_outcomes: Counter[str] = field(default_factory=Counter)
    """Compile-cache outcomes: counts of `loaded`, `written`, `not written` and `not handed out` (by torch)."""


@contextmanager
def apply_speedups(pipe: Any, placement: Placement, request: CallRequest) -> Iterator[None]:
    """Apply the plan's speedups to the call in the `with` block, and measure its duration."""
    if placement.residence != "resident" or placement.shared:
        # A call inside a callback must not count as steps of the outer call.
        with track_steps(pipe, None), _checking_compiled(placement, request):
            yield
        return
    speed = placement.speed = placement.speed or SpeedState()
    # Quantize before compiling: compiled code would still hold the old layers.
    quantize_denoisers(pipe, placement)
    _compile(pipe, placement, speed)
    if placement.plan.capture.value:
        _set_capture(pipe, placement, speed)
    is_new_shape = speed.compiled and bucket_of(request) not in speed.shapes
    key = load_compiled(pipe, placement, speed, bucket_of(request)) if is_new_shape else None
    start = time.perf_counter()
    with _checking_compiled(placement, request), _skip_steps(pipe, placement), _pause_gc(is_new_shape):
        yield
    seconds = time.perf_counter() - start
    if is_new_shape:
        # Only after success: an interrupted shape must be compiled and saved by a later call.
        speed.shapes.add(bucket_of(request))
    speed.images += request.images
    speed.seconds += seconds
    if key is not None:
        save_compiled(speed, key, seconds)
    _report(placement)


@contextmanager
def _pause_gc(pause: bool) -> Iterator[None]:
    """Pause Python's garbage collector inside the `with` block if `pause` is set, and run it once afterwards."""
    # It takes about a fifth of the compile time and frees almost nothing. Dynamo also collects after every graph
    # (run_gc_after_compile): https://github.com/pytorch/pytorch/pull/142519
    if not pause:
        yield
        return
    with gc_paused(), pause_gc_after_compile():
        yield
    # Dynamo leaves reference cycles with the model in them, which would keep it alive after `del pipe`.
    release_unreachable()


@contextmanager
def _skip_steps(pipe: Any, placement: Placement) -> Iterator[None]:
    """Reuse earlier denoiser outputs inside the `with` block, at the steps that the plan selects."""
    rule = placement.plan.step_skipping.value
    with track_steps(pipe, rule) as skipper:
        if skipper is None:
            yield
            return
        for model in find_denoisers(pipe, placement).values():
            set_override(model, Slot.STEP_SKIPPING, functools.partial(_run_or_reuse, id(model), LayerHooks(model)))
        yield
    text = f"{skipper.run} denoiser runs, {skipper.reused} outputs reused" if skipper.reused else "every step ran"
    placement.report.step_skipping = Decision(text, "observed in the last call")


def _run_or_reuse(
    model_id: int, hooks: LayerHooks, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    # Looked up per thread: another pipeline with the same model may run concurrently.
    skipper = current_step_skipper()
    # Hooks read what the layers compute at this step (self-attention guidance), so the step must run.
    if skipper is None or hooks.any():
        return forward(*args, **kwargs)
    return skipper.run_or_reuse(model_id, forward, args, kwargs)


def load_compiled(pipe: Any, placement: Placement, speed: SpeedState, shape: str) -> dict[str, str] | None:
    """Load the compiled code for a shape from the compile cache; return None if that succeeds.

    Otherwise, return the cache key under which to save the code after it is compiled.
    """
    key = make_cache_key(pipe, placement, shape)
    payload = load_payload(key)
    if payload is None:
        return key
    message = "torch cannot read the cache entry"
    try:
        # With the same cache directory as during the call: torch unpacks the artifacts there.
        with compile_cache_env(placement), drop_log_records(CACHE_LOGGER):
            loaded = torch.compiler.load_cache_artifacts(payload)
    except Exception as error:  # noqa: BLE001 - an entry that cannot be loaded is compiled again
        loaded, message = None, str(error)
    if loaded is not None:
        speed.cache_outcomes["loaded"] += 1
        return None
    _LOG.warning("anyaccel: cannot load compiled code from the cache, so the models are compiled again: %s", message)
    remove_payload(key)
    return key


def save_compiled(speed: SpeedState, key: dict[str, str], seconds: float) -> None:
    """Save the code compiled by this process to the compile cache, if torch can serialize it."""
    # All artifacts of this process, not only those of one shape; None if torch has none or cannot serialize them.
    artifacts = torch.compiler.save_cache_artifacts()
    written = artifacts is not None and save_payload(key, artifacts[0], seconds)
    speed.cache_outcomes["not handed out" if artifacts is None else "written" if written else "not written"] += 1


def _compile(pipe: Any, placement: Placement, speed: SpeedState) -> None:
    """Compile models if that is expected to save time, and recompile them if compiled code was removed."""
    is_sliced = placement.call_plan.attention.value != placement.plan.attention.value
    if speed.compiled and (is_sliced or not _are_compiled(placement, speed.models)):
        remove_speedups(pipe, placement)
    policy = placement.plan.compile_policy.value
    # Without `expected_images`, as many images are expected as have been generated (docs/decisions/0007).
    seconds_per_image = speed.seconds / max(1, speed.images)
    expected_images = placement.options.expected_images
    if speed.compiled or not is_worth_compiling(policy, seconds_per_image, speed.images, expected_images):
        return
    if is_sliced:  # graphs contain the attention of the plan, not the slices that this size needs
        reason = "not compiled at this size: attention is sliced to fit in memory"
        placement.report.not_compiled = Decision(tuple(find_denoisers(pipe, placement)), reason)
        return
    speed.compiled, placement.report.not_compiled = True, None
    _LOG.info("anyaccel: compiling takes about %.0f s and is expected to save time overall", policy.compile_s)
    names = speed.models = compile_for_speed(pipe, placement)
    reason = f"{placement.plan.compile_policy}: {placement.plan.compile_policy.reason}"
    placement.report.compiled_models = Decision(names, reason)


def _are_compiled(placement: Placement, names: tuple[str, ...]) -> bool:
    """Return whether the named models still have compiled code, which other pipelines may have removed."""
    modules = dict(_list_compilable(placement))
    return all(find_compiled(modules[name]) is not None for name in names if name in modules)


@contextmanager
def _checking_compiled(placement: Placement, request: CallRequest) -> Iterator[None]:
    """Switch compiled modules to eager mode if they have changed since compilation; then run the `with` block."""
    has_callback = any("callback" in name and callable(value) for name, value in request.arguments.items())
    with ExitStack() as stack:
        for _, module in _list_compilable(placement):
            compiled = find_compiled(module)
            if compiled is not None:
                stack.enter_context(compiled.in_call(has_callback=has_callback))
        yield


def _list_compilable(placement: Placement) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield each denoiser and each autoencoder's decoder, with the name of its model."""
    for name, reference in placement.placed.items():
        model = reference()
        if model is None:
            continue
        if name in placement.denoisers:
            yield name, model
        elif has_decoder(model):
            yield name, getattr(model, "decoder")  # noqa: B009 - not an attribute of nn.Module


def _has_memory_for_capture(placement: Placement) -> bool:
    """Return whether the buffers for captured graphs fit in memory; if not, add the reason to the report."""
    forecast = placement.report.forecast
    if forecast is None or forecast.recorded_peak_bytes <= forecast.capacity_bytes:
        return True
    peak, capacity = readable(forecast.recorded_peak_bytes), readable(forecast.capacity_bytes)
    placement.report.capture = Decision(
        False, f"captured graphs would need {peak} at this size, but only {capacity} is available"
    )
    return False


def _set_capture(pipe: Any, placement: Placement, speed: SpeedState) -> None:
    """Enable graph capture for the denoisers if they are compiled or if the user requested it.

    Disable it if the buffers for captured graphs do not fit in memory.
    """
    if not _has_memory_for_capture(placement):
        for model in find_denoisers(pipe, placement).values():
            remove_override(model, Slot.CAPTURE)
        return
    driver, index = placement.opened.driver, placement.opened.index
    recorder = driver.recorder(index)
    if recorder is None or not (speed.compiled or placement.options.capture):
        return
    for model in find_denoisers(pipe, placement).values():
        capture = get_override(model, Slot.CAPTURE)
        if not isinstance(capture, GraphCapture):
            capture = GraphCapture(model, recorder, functools.partial(driver.synchronize, index))
            set_override(model, Slot.CAPTURE, capture)
        capture.begin_call()


def _report(placement: Placement) -> None:
    """Add the outcomes of this call's compilation and graph capture to the report."""
    captures = []
    for name, module in _list_compilable(placement):
        compiled = find_compiled(module)
        if compiled is not None and compiled.failure:
            placement.report.add_not_compiled(name, compiled.failure)
        captures.append(get_override(module, Slot.CAPTURE))
    status = [capture for capture in captures if isinstance(capture, GraphCapture) and capture.status]
    if status:
        captured = [capture for capture in status if capture.captured_shapes]
        failed = [capture for capture in status if capture.failed]
        reason = (captured or failed or status)[0].status
        if not captured and not failed:
            reason = f"the model or its input shapes change too often; {reason}"
        placement.report.capture = Decision(bool(captured), reason)


def forget_captured_graphs(pipe: Any) -> None:
    """Release a pipeline's captured graphs and the memory that they use."""
    for model in find_models(pipe).values():
        capture = get_override(model, Slot.CAPTURE)
        if isinstance(capture, GraphCapture):
            capture.forget()


def remove_speedups(pipe: Any, placement: Placement | None) -> None:
    """Remove a pipeline's compiled code, captured graphs and step skipping.

    This is required before weights are moved or cast.
    """
    for model in find_models(pipe).values():
        for module in (model, *model.children()):  # the decoder of an autoencoder is a child
            for slot in (Slot.STEP_SKIPPING, Slot.CAPTURE, Slot.COMPILE):
                remove_override(module, slot)
    if placement is None:
        return
    report = placement.report
    report.not_compiled = report.capture = None
    if placement.speed is None or not placement.speed.compiled:
        return
    placement.speed.compiled = False
    placement.speed.shapes.clear()
    report.compiled_models = report.compiled_sizes = None
    for model in find_denoisers(pipe, placement).values():
        remove_compiled_blocks(model)
