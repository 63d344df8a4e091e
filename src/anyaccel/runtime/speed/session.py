"""Speed-ups of a placed pipeline: models are compiled once that pays, and denoisers are captured where that pays."""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from anyaccel.forward_overrides import Slot, get_override, remove_override, set_override
from anyaccel.library_logging import drop_log_records
from anyaccel.planning.decision import Decision
from anyaccel.planning.speedups import is_worth_compiling
from anyaccel.processes.gc_control import gc_paused
from anyaccel.runtime.call_request import CallRequest, bucket_of
from anyaccel.runtime.introspection import find_denoisers, find_models
from anyaccel.runtime.placement_state import Placement
from anyaccel.runtime.speed.compile import compile_cache_env, compile_for_speed, has_decoder
from anyaccel.runtime.speed.compile_cache import load_payload, remove_payload, save_payload
from anyaccel.runtime.speed.compile_cache_key import make_cache_key
from anyaccel.runtime.speed.compiled_forward import find_compiled, remove_compiled_blocks
from anyaccel.runtime.speed.graph_capture import GraphCapture
from anyaccel.runtime.speed.quantize import quantize_denoisers
from anyaccel.runtime.speed.step_skipping import current_step_skipper, track_steps
from anyaccel.units import readable
from anyaccel.upstream.torch_internals import CACHE_LOGGER, pause_collection_after_compile

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
    """How long images took so far, and whether models were compiled because of that."""

    images: int = 0
    seconds: float = 0.0
    compiled: bool = False
    models: tuple[str, ...] = ()
    """The models that were compiled."""
    shapes: set[str] = field(default_factory=set)
    """The shapes that were run compiled."""
    cache_outcomes: Counter[str] = field(default_factory=Counter)
    """Compile-cache outcomes: how often an entry was `loaded`, `written`, `not written`, `not handed out`."""


@contextmanager
def apply_speedups(pipe: Any, placement: Placement, part: CallRequest) -> Iterator[None]:
    """Run a call with the speed-ups of its plan; the time it takes counts for the next."""
    if placement.residence != "resident" or placement.shared:
        with track_steps(pipe, None):  # a call inside another one's callback is not among that one's steps
            yield
        return
    speed = placement.speed = placement.speed or SpeedState()
    quantize_denoisers(pipe, placement)
    _compile(pipe, placement, speed)
    _check_compiled(placement)
    if placement.plan.capture.value:
        _set_capture(pipe, placement, speed)
    new = speed.compiled and bucket_of(part) not in speed.shapes
    key = load_compiled(pipe, placement, speed, bucket_of(part)) if new else None
    start = time.perf_counter()
    with _reuse_steps(pipe, placement), _collect_later(new):
        yield
    seconds = time.perf_counter() - start
    if new:
        speed.shapes.add(bucket_of(part))  # not before: what was interrupted is compiled and saved by a later call
    speed.images += part.images
    speed.seconds += seconds
    if key is not None:
        save_compiled(speed, key, seconds)
    _report(placement)


@contextmanager
def _collect_later(later: bool) -> Iterator[None]:
    """Pause the garbage collector while a call compiles: it would take a fifth of the time and free next to nothing."""
    if not later:
        yield
        return
    with gc_paused(), pause_collection_after_compile():
        yield


@contextmanager
def _reuse_steps(pipe: Any, placement: Placement) -> Iterator[None]:
    """Let denoisers return earlier outputs at the steps that the plan names."""
    rule = placement.plan.step_skipping.value
    with track_steps(pipe, rule) as steps:
        if steps is None:
            yield
            return
        for model in find_denoisers(pipe, placement).values():
            set_override(model, Slot.STEP_REUSE, functools.partial(_reuse_output, id(model)))
        yield
    text = f"{steps.run} runs, {steps.reused} outputs reused" if steps.reused else "every step was run"
    placement.report.step_skipping = Decision(text, "the last call")


def _reuse_output(who: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    steps = current_step_skipper()  # of the call in this thread: another pipeline may have the same model
    return forward(*args, **kwargs) if steps is None else steps.answer(who, forward, args, kwargs)


def load_compiled(pipe: Any, placement: Placement, speed: SpeedState, shape: str) -> dict[str, str] | None:
    """Load what the compile cache has for a shape, before it is first run; return its key if nothing was loaded."""
    key = make_cache_key(pipe, placement, shape)
    payload = load_payload(key)
    if payload is None:
        return key
    message = "torch cannot read it"
    try:
        # Compiling: into the directory that is searched later.
        with compile_cache_env(placement), drop_log_records(CACHE_LOGGER):
            loaded = torch.compiler.load_cache_artifacts(payload)
    except Exception as error:  # noqa: BLE001 - what cannot be loaded is compiled
        loaded, message = None, str(error)
    if loaded is not None:
        speed.cache_outcomes["loaded"] += 1
        return None
    _LOG.warning("anyaccel: a cached compilation cannot be loaded, and is compiled again: %s", message)
    remove_payload(key)
    return key


def save_compiled(speed: SpeedState, key: dict[str, str], seconds: float) -> None:
    """Save what was compiled, where torch hands it out."""
    made = torch.compiler.save_cache_artifacts()
    written = made is not None and save_payload(key, made[0], seconds)
    speed.cache_outcomes["not handed out" if made is None else "written" if written else "not written"] += 1


def _compile(pipe: Any, placement: Placement, speed: SpeedState) -> None:
    """Compile what the plan says once that pays, and again after another pipeline removed what was compiled."""
    sliced = placement.call_plan.attention.value != placement.plan.attention.value
    if speed.compiled and (sliced or not _are_compiled(placement, speed.models)):
        remove_speedups(pipe, placement)
    choice = placement.plan.compile_policy.value
    each = speed.seconds / max(1, speed.images)
    if speed.compiled or not is_worth_compiling(choice, each, speed.images, placement.options.expected_images):
        return
    if sliced:  # graphs hold attention as planned, not as memory requires it at this size
        reason = "not at this size: attention is sliced to fit into the memory"
        placement.report.not_compiled = Decision(tuple(find_denoisers(pipe, placement)), reason)
        return
    speed.compiled, placement.report.not_compiled = True, None
    _LOG.info("anyaccel: compiling, which takes about %.0f s and is expected to pay", choice.takes_s)
    names = speed.models = compile_for_speed(pipe, placement)
    reason = f"{placement.plan.compile_policy}: {placement.plan.compile_policy.reason}"
    placement.report.compiled_models = Decision(names, reason)


def _are_compiled(placement: Placement, names: tuple[str, ...]) -> bool:
    """Return whether models still run what was compiled: pipelines share models, and models are replaced."""
    there = dict(_list_compiled(placement))
    return all(find_compiled(there[name]) is not None for name in names if name in there)


def _check_compiled(placement: Placement) -> None:
    """Stop running compiled code of modules that are not what was compiled."""
    for _, module in _list_compiled(placement):
        compiled = find_compiled(module)
        if compiled is not None:
            compiled.begin_call()


def _list_compiled(placement: Placement) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, reference in placement.placed.items():
        model = reference()
        if model is None:
            continue
        if name in placement.denoisers:
            yield name, model
        elif has_decoder(model):
            yield name, getattr(model, "decoder")  # noqa: B009 - no attribute of every module


def _has_room(placement: Placement) -> bool:
    """Return whether there is memory for what captured graphs hold."""
    forecast = placement.report.forecast
    if forecast is None or forecast.recorded_peak_bytes <= forecast.capacity_bytes:
        return True
    need, there = readable(forecast.recorded_peak_bytes), readable(forecast.capacity_bytes)
    placement.report.capture = Decision(
        False, f"not at this size: with captured graphs it would need {need} of {there}"
    )
    return False


def _set_capture(pipe: Any, placement: Placement, speed: SpeedState) -> None:
    """Let denoisers be captured: compiled ones, or any if the user requests it, and only where there is room."""
    if not _has_room(placement):
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
    """Report what became of compiling and capturing in a call."""
    captures = []
    for name, module in _list_compiled(placement):
        compiled = find_compiled(module)
        if compiled is not None and compiled.failure:
            placement.report.add_not_compiled(name, compiled.failure)
        captures.append(get_override(module, Slot.CAPTURE))
    status = [capture for capture in captures if isinstance(capture, GraphCapture) and capture.status]
    if status:
        captured = any(capture.captured_shapes for capture in status)
        placement.report.capture = Decision(captured, status[0].status)


def forget_captured_graphs(pipe: Any) -> None:
    """Drop captured graphs and the memory that they hold."""
    for model in find_models(pipe).values():
        capture = get_override(model, Slot.CAPTURE)
        if isinstance(capture, GraphCapture):
            capture.forget()


def remove_speedups(pipe: Any, placement: Placement | None) -> None:
    """Let all models run as diffusers made them, before weights move or dtypes change."""
    for model in find_models(pipe).values():
        for part in (model, *model.children()):
            for slot in (Slot.STEP_REUSE, Slot.CAPTURE, Slot.COMPILE):
                remove_override(part, slot)
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
