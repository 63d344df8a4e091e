"""Speed: models are compiled once that pays, and what a denoiser asks of the device is recorded where that pays."""

from __future__ import annotations

import gc
import importlib
import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from anyaccel.backends.size import readable
from anyaccel.garbage import without_collecting
from anyaccel.planning.decision import Decision
from anyaccel.planning.speed import is_worth_compiling
from anyaccel.runtime import host_layers
from anyaccel.runtime.artefact_key import describe_key
from anyaccel.runtime.artefacts import load_payload, remove_payload, save_payload, without_log
from anyaccel.runtime.compile import compile_for_speed, compiling, has_decoder
from anyaccel.runtime.fast_forward import FastForward, can_stand_in, find_fast_forward, find_stranger, release
from anyaccel.runtime.placement import Placement, find_models
from anyaccel.runtime.quantize import quantize_denoisers
from anyaccel.runtime.request import Request, bucket_of
from anyaccel.runtime.step_reuse import counting_steps

__all__ = ["Speed", "forget_recordings", "slow_down", "speeding"]

_LOG = logging.getLogger("anyaccel")
_STEPS_TO_PAY = 4
"""A UNet of Stable Diffusion 1.5's shape takes two plain steps' time to lay out, and 0.6 of one's from then on."""


@dataclass
class Speed:
    """What pictures took so far, and whether models were compiled for it."""

    pictures: int = 0
    seconds: float = 0.0
    compiled: bool = False
    laid_out: bool = False
    """Whether weights lie as the host's products read them."""
    shapes: set[str] = field(default_factory=set)
    """The shapes that were run compiled."""
    fates: Counter[str] = field(default_factory=Counter)
    """What became of what was compiled: how much was `loaded`, `written`, `not written`, `not handed out`."""


@contextmanager
def speeding(pipe: Any, placement: Placement, part: Request) -> Iterator[None]:
    """While a call runs: models are as fast as the plan says; how long it took counts for the next."""
    if placement.residence != "resident" or placement.shared:
        with counting_steps(pipe, None):  # a call inside another one's callback is not among that one's steps
            yield
        return
    speed = placement.speed = placement.speed or Speed()
    if placement.plan.host_layers.value and (speed.laid_out or _has_steps(part, _STEPS_TO_PAY)):
        speed.laid_out = True  # from then on every call is: what changed since the last one is looked for here
        for name, model in find_models(pipe).items():
            if name not in placement.denoisers and not has_decoder(model):
                continue  # it runs once for a prompt
            if not host_layers.install(model, second_filters=placement.plan.memory.value.way.second_filters):
                _forget(model)
    quantize_denoisers(pipe, placement)
    _compile(pipe, placement, speed)
    if placement.plan.capture.value and _has_room(placement):
        _capture(pipe, placement, speed, part)
    new = speed.compiled and bucket_of(part) not in speed.shapes
    key = _fetch_compiled(pipe, placement, speed, bucket_of(part)) if new else None
    start = time.perf_counter()
    with _reusing(pipe, placement), _collecting_later(new):
        yield
    took = time.perf_counter() - start
    speed.pictures += part.images
    speed.seconds += took
    if key is not None:
        _keep_compiled(speed, key, took)
    _tell(pipe, placement)


def _has_steps(part: Request, enough: int) -> bool:
    """Whether a call has steps enough to make up for what is done once."""
    steps = part.arguments.get("num_inference_steps")
    return not isinstance(steps, int) or steps >= enough


@contextmanager
def _collecting_later(later: bool) -> Iterator[None]:
    """While a call compiles: no garbage is looked for, which would take a fifth of the time and find next to none."""
    if not later or not gc.isenabled():
        yield
        return
    dynamo: Any = importlib.import_module("torch._dynamo.config")  # which collects by itself after each graph
    by_itself = dynamo.patch(run_gc_after_compile=False) if hasattr(dynamo, "run_gc_after_compile") else nullcontext()
    with without_collecting(), by_itself:
        yield


@contextmanager
def _reusing(pipe: Any, placement: Placement) -> Iterator[None]:
    """While a call runs: denoisers answer as before at the steps that the plan says."""
    models = find_models(pipe)
    with counting_steps(pipe, placement.plan.reuse.value) as steps:
        if steps is None:
            yield
            return
        for name in placement.denoisers:
            _stand_in(models[name])
        yield
    reuse = placement.plan.reuse
    done = f"{steps.run} runs, {steps.reused} answers taken again" if steps.reused else "every step was run"
    reason = f"{reuse.reason.split('; last picture')[0]}; last picture: {done}"
    placement.plan = replace(placement.plan, reuse=Decision(reuse.value, reason))


def _stand_in(model: torch.nn.Module) -> FastForward | None:
    """What stands in for a model's forward; None where something else does."""
    found = find_fast_forward(model)
    if found is None and can_stand_in(model):
        found = FastForward(model)
        found.install()
    return found


def _fetch_compiled(pipe: Any, placement: Placement, speed: Speed, shape: str) -> dict[str, str] | None:
    """Before a shape is first run compiled: load what is kept for it; the key to keep it by, where nothing is."""
    speed.shapes.add(shape)
    key = describe_key(pipe, placement, shape)
    kept = load_payload(key)
    if kept is None:
        return key
    words = "torch cannot read it"
    try:
        with compiling(placement), without_log("torch.compiler._cache"):  # where it is looked for when the models run
            found = torch.compiler.load_cache_artifacts(kept)
    except Exception as error:  # noqa: BLE001 - what cannot be loaded is compiled
        found, words = None, str(error)
    if found is not None:
        speed.fates["loaded"] += 1
        return None
    _LOG.warning("anyaccel: what was kept cannot be loaded, and is made anew: %s", words)
    remove_payload(key)
    return key


def _keep_compiled(speed: Speed, key: dict[str, str], took_s: float) -> None:
    """Keep what was compiled, where torch hands it out."""
    made = torch.compiler.save_cache_artifacts()
    fate = "not handed out" if made is None else "written" if save_payload(key, made[0], took_s) else "not written"
    speed.fates[fate] += 1


def _compile(pipe: Any, placement: Placement, speed: Speed) -> None:
    choice = placement.plan.compiling.value
    each = speed.seconds / max(1, speed.pictures)
    if speed.compiled or not is_worth_compiling(choice, each, speed.pictures, placement.wishes.pictures):
        return
    speed.compiled = True
    _LOG.info("anyaccel: compiling, which takes about %.0f s and is expected to pay", choice.takes_s)
    names = compile_for_speed(pipe, placement)
    placement.plan = replace(
        placement.plan, compiled=Decision(names, f"{placement.plan.compiling}: {placement.plan.compiling.reason}")
    )


def _has_room(placement: Placement) -> bool:
    """Whether the memory is there that recordings hold."""
    forecast = placement.plan.forecast
    if forecast is None or forecast.recorded_peak_bytes <= forecast.capacity_bytes:
        return True
    need, there = readable(forecast.recorded_peak_bytes), readable(forecast.capacity_bytes)
    capture = Decision(
        placement.plan.capture.value, f"not at this size: with recordings it would need {need} of {there}"
    )
    placement.plan = replace(placement.plan, capture=capture)
    return False


def _capture(pipe: Any, placement: Placement, speed: Speed, part: Request) -> None:
    """Let the models that run at every step be recorded, where nothing else stands in for their forward.

    A graph of the device is recorded of what was compiled, unless it is asked for; calls of the host, of what was not.
    """
    recorder = placement.opened.driver.recorder(placement.opened.index)
    if recorder is None or (speed.compiled if recorder.of_calls else not (speed.compiled or placement.wishes.capture)):
        return
    models = find_models(pipe)
    for name in placement.denoisers:
        found = _stand_in(models[name])
        if found is None:
            continue
        stranger = find_stranger(models[name]) if recorder.of_calls else ""
        found.recorder = None if stranger else recorder
        if stranger:
            found.forget()
            found.told = f"not while {stranger} is in it, whose Python a replay would leave out"
        else:
            found.warm = 1 if recorder.of_calls and _has_steps(part, recorder.warm) else recorder.warm
            found.wait = lambda: placement.opened.driver.synchronize(placement.opened.index)
            found.renew()


def _tell(pipe: Any, placement: Placement) -> None:
    """Put on the plan what was found about recording."""
    models = find_models(pipe)
    found = [one for name in placement.denoisers if (one := find_fast_forward(models[name])) is not None and one.told]
    if not found:
        return
    done = "recorded" if any(one.recordings for one in found) else "as it is"
    capture = Decision(placement.plan.capture.value, f"{found[0].told}: {done}")
    if capture != placement.plan.capture:
        placement.plan = replace(placement.plan, capture=capture)


def forget_recordings(pipe: Any) -> None:
    """Let go of what was recorded, and of the memory that it holds."""
    for model in find_models(pipe).values():
        _forget(model)


def _forget(model: torch.nn.Module) -> None:
    found = find_fast_forward(model)
    if found is not None:
        found.forget()


def slow_down(pipe: Any, placement: Placement | None) -> None:
    """Let all models run as diffusers made them: before weights move, or number types change."""
    for model in find_models(pipe).values():
        for part in (model, *model.children()):
            release(part)
        host_layers.remove(model)
    if placement is None or placement.speed is None or not placement.speed.compiled:
        return
    placement.speed.compiled = False
    for name in placement.denoisers:  # blocks that were compiled in place
        for part in find_models(pipe)[name].modules():
            part._compiled_call_impl = None
