"""Running a call in the memory that there is: as planned, and after running out with the next rule, and the next."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from anyaccel.backends.out_of_memory import is_out_of_memory
from anyaccel.errors import AnyaccelError, first_line
from anyaccel.planning.attention import choose_attention
from anyaccel.planning.decision import Decision
from anyaccel.planning.memory import MemoryRule, Residence
from anyaccel.planning.workarounds import choose_workarounds
from anyaccel.processes.gc_control import release_unreachable
from anyaccel.runtime.batch_split import split_request
from anyaccel.runtime.call_request import CallRequest, shape_of
from anyaccel.runtime.introspection import find_components, read_facts
from anyaccel.runtime.placement.memory_plan import CallPlan, does_not_fit, find_capacity, list_call_rules, plan_call
from anyaccel.runtime.placement.offload import (
    end_phase,
    find_lost_change,
    has_unstreamed_weights,
    make_lost_change_error,
    move_to_cpu,
    set_residence,
)
from anyaccel.runtime.placement.oom_history import has_outcome, load_outcome, save_outcome
from anyaccel.runtime.placement_state import Placement, being_offloaded, find_placement
from anyaccel.runtime.speed.session import forget_captured_graphs, remove_speedups
from anyaccel.runtime.workarounds.function_modes import make_pipeline_function_mode
from anyaccel.runtime.workarounds.model_inputs import set_input_adapters
from anyaccel.tracing.footprint_measurement import set_parts

__all__ = ["apply_rule", "clear_traceback_frames", "free", "move_weights", "run_within_memory", "weights_on_cpu"]

_LOG = logging.getLogger(__name__)

Run = Callable[[CallRequest, int, int], Any]
"""Runs a part of a request: the part, its first image, and how many parts there are."""


def run_within_memory(pipe: Any, placement: Placement, request: CallRequest, run: Run) -> list[Any]:
    """The results of a request's parts; images that were made before memory ran out are kept."""
    _check_weights(pipe, placement)
    before = placement.memory_rule
    rules = list_call_rules(pipe, placement, request.images)
    if placement.plan.parallel.value is not None:  # ranks must do the same: none works ahead or tries again by itself
        rules = [next((rule for rule in rules if rule.residence == placement.residence), rules[0])]
    chosen = _choose(pipe, placement, request, rules)
    results: list[Any] = []
    done = 0
    words = ""
    at = rules.index(chosen.decision.value) if chosen.decision.value in rules else 0
    for place, rule in enumerate(rules[at:]):
        decision = chosen.decision if place == 0 else Decision(rule, f"memory ran out before: {words}")
        try:
            apply_rule(pipe, placement, decision, chosen if place == 0 else None)
            parts = split_request(request, _at_once(placement, rule), first=done)
            for part in parts:
                results.append(run(part, done, len(parts)))
                done += part.images
            if rule.residence != "resident":
                end_phase(pipe)
        except BaseException as error:
            if not is_out_of_memory(error):
                _send_weights_back(pipe, placement)
                raise
            words = first_line(error)
            clear_traceback_frames(error)
        else:
            if place:
                placement.call_plans[shape_of(request)] = CallPlan(decision)
                save_outcome(_key(pipe, placement, request), rule, find_capacity(pipe, placement))
            return results
        forget_captured_graphs(pipe)
        if placement.residence != "resident":
            placement.residence = None  # models that were cut short lie where they lay
        free(placement)
        _LOG.warning("anyaccel: out of memory with %s at %s; trying the next way", rule, shape_of(request))
    _restore(pipe, placement, before)
    raise does_not_fit(pipe, placement, request, f"every way was tried, and the device says: {words}")


def _check_weights(pipe: Any, placement: Placement) -> None:
    """Weights that lie elsewhere cannot be changed in place: what somebody wrote to them is lost, and must not be."""
    changed = find_lost_change(pipe) if placement.residence in ("phase", "layer") else None
    if changed is not None:
        raise make_lost_change_error(changed)
    if placement.residence == "layer" and has_unstreamed_weights(pipe):
        move_weights(pipe, placement, "layer")


@contextmanager
def weights_on_cpu(pipe: Any) -> Iterator[None]:
    """While the block runs, weights that wait elsewhere are in their models, on the host."""
    placement = find_placement(pipe)
    residence = placement.residence if placement is not None else None
    if placement is None or residence not in ("phase", "layer"):
        yield
        return
    move_to_cpu(pipe)
    placement.residence = None
    try:
        yield
    finally:
        move_weights(pipe, placement, residence)


def _send_weights_back(pipe: Any, placement: Placement) -> None:
    """A call was cut short: the weights that it had fetched go back to where they wait."""
    if placement.residence in ("phase", "layer"):
        end_phase(pipe, failed=True)
    elif placement.residence == "component" and not placement.offloaded_by_user:
        with being_offloaded(pipe):
            pipe.maybe_free_model_hooks()


def _choose(pipe: Any, placement: Placement, request: CallRequest, rules: list[MemoryRule]) -> CallPlan:
    """What was planned for this shape before, what was learnt of it, or what can be worked out."""
    shape = shape_of(request)
    if placement.plan.parallel.value is not None:
        return CallPlan(Decision(rules[0], placement.weights_rule.reason))
    known = placement.call_plans.get(shape)
    if known is not None and known.decision.value in rules:
        return known
    learnt = load_outcome(_key(pipe, placement, request), find_capacity(pipe, placement)) if has_outcome() else None
    if learnt in rules:
        chosen = CallPlan(Decision(learnt, "a call of this shape ran out of memory here with anything faster"))
    else:
        chosen = plan_call(pipe, placement, request, rules)
    placement.call_plans[shape] = chosen
    return chosen


def _key(pipe: Any, placement: Placement, request: CallRequest) -> str:
    facts = read_facts(pipe)
    weights = ", ".join(f"{component.name} {component.parameters}" for component in facts.components)
    device = f"{placement.plan.title} {placement.opened.driver.device_name(placement.opened.index)}"
    return f"{device} | {facts.pipeline}: {weights} | {placement.plan.dtype.value} | {shape_of(request)}"


def _at_once(placement: Placement, rule: MemoryRule) -> int | None:
    limits = [number for number in (rule.images_per_call, placement.plan.images_per_call.value) if number is not None]
    return min(limits, default=None)


def apply_rule(pipe: Any, placement: Placement, decision: Decision[MemoryRule], call: CallPlan | None = None) -> None:
    """Bring a pipeline into the shape that a rule says."""
    rule = decision.value
    if rule.residence != placement.residence:
        move_weights(pipe, placement, rule.residence)
    if rule.savings.vae_in_parts != placement.vae_in_parts:
        set_parts(pipe, rule.savings.vae_in_parts)
        placement.vae_in_parts = rule.savings.vae_in_parts
    sheet, plan = placement.opened.sheet, placement.plan
    attention = plan.attention
    if rule.savings.sliced_attention:
        options = replace(placement.options, attention_slicing="max")
        attention = choose_attention(sheet, options, int(getattr(torch, plan.dtype.value).itemsize))
        attention = replace(attention, reason="all heads at once do not fit into the memory")
    report = placement.report
    report.memory = None if decision == plan.memory else decision
    report.forecast = call.forecast if call else None
    if attention.value != placement.call_plan.attention.value:
        workarounds = choose_workarounds(sheet, plan.replacements.value, attention.value)
        placement.call_plan = replace(plan, attention=attention, workarounds=workarounds)
        set_input_adapters(find_components(pipe), placement.call_plan, placement.device)


def move_weights(pipe: Any, placement: Placement, residence: Residence) -> None:
    """Bring the weights to where a rule wants them; until they are there, they are nowhere for certain."""
    placement.residence = None
    remove_speedups(pipe, placement)
    move_to_cpu(pipe)  # outside the seam, which would bring what lies on the host to a device that may be full
    with make_pipeline_function_mode(placement.plan, placement.device):
        set_residence(pipe, residence, placement.device, placement.opened)
    placement.residence = residence


def _restore(pipe: Any, placement: Placement, before: Decision[MemoryRule]) -> None:
    """Back to how the pipeline was before a call that failed; where even that does not fit, to the host."""
    free(placement)
    try:
        apply_rule(pipe, placement, before)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        clear_traceback_frames(error)
        free(placement)


def clear_traceback_frames(error: BaseException) -> None:
    """Let go of what the functions that failed still hold, those of errors behind the error too."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__


def free(placement: Placement) -> None:
    """Let go of what a failed run left behind."""
    release_unreachable()
    try:
        placement.opened.driver.empty_cache()
    except (AnyaccelError, RuntimeError):
        return
