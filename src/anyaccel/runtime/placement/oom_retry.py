"""Out-of-memory retries: run a call, and retry with the next memory settings if it runs out of memory."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from opcode import opmap
from typing import Any

import torch

from anyaccel.backends.out_of_memory import is_out_of_memory
from anyaccel.errors import AnyaccelError, first_line
from anyaccel.planning.attention import choose_attention
from anyaccel.planning.decision import Decision
from anyaccel.planning.memory import MemoryRule, Residence
from anyaccel.planning.workarounds import choose_workarounds
from anyaccel.processes.gc_control import release_unreachable
from anyaccel.runtime.call_request import CallRequest, shape_of
from anyaccel.runtime.introspection import find_components, find_denoisers, find_models, read_facts
from anyaccel.runtime.library_code import is_library
from anyaccel.runtime.placement.memory_plan import (
    CallPlan,
    find_capacity,
    list_call_rules,
    make_does_not_fit_error,
    plan_call,
)
from anyaccel.runtime.placement.offload import (
    end_phase,
    has_unstreamed_weights,
    map_offloaded_weights,
    move_to_cpu,
    set_residence,
)
from anyaccel.runtime.placement.oom_history import has_outcome, load_outcome, save_outcome
from anyaccel.runtime.placement.row_split import find_split_obstacle
from anyaccel.runtime.placement_state import Placement, find_placement, record_placed_models
from anyaccel.runtime.speed.apply_speedups import forget_captured_graphs, remove_speedups
from anyaccel.runtime.workarounds.function_modes import make_pipeline_function_mode
from anyaccel.runtime.workarounds.model_inputs import set_input_adapters
from anyaccel.tracing.footprint_measurement import set_vae_tiling

__all__ = [
    "apply_rule",
    "clear_traceback_frames",
    "free_memory",
    "move_weights",
    "remove_offload_hooks",
    "run_within_memory",
    "weights_on_cpu",
]

_LOG = logging.getLogger(__name__)

# Runs a request. Argument: the largest number of images that the models run at a time.
Run = Callable[[int | None], Any]


def run_within_memory(pipe: Any, placement: Placement, request: CallRequest, run: Run) -> Any:
    """Run a request with its memory settings, and return the result.

    After an out-of-memory error, run it again with the next memory settings. Raise `DoesNotFitError` if no
    settings remain. Errors that the user's own code raises are not changed.
    """
    _stream_new_weights(pipe, placement)
    before = placement.memory_rule
    rules = list_call_rules(pipe, placement, request.images)
    if placement.plan.parallel.value is not None:
        # No retries: if only one rank retried, the others would wait for it in a collective.
        rules = [next((rule for rule in rules if rule.residence == placement.residence), rules[0])]
    chosen = _choose_rule(pipe, placement, request, rules)
    message, is_from_device = "", True
    start = rules.index(chosen.decision.value) if chosen.decision.value in rules else 0
    for attempt, rule in enumerate(_skip_useless_splits(pipe, placement, rules[start:])):
        reason = f"a faster memory mode ran out of memory: {message}" if attempt else chosen.decision.reason
        decision = Decision(rule, reason)
        try:
            apply_rule(pipe, placement, decision, chosen if attempt == 0 else None)
            result = run(_images_per_call(placement, rule))
            if rule.residence != "resident":
                end_phase(pipe)
        except BaseException as error:
            if not is_out_of_memory(error) or _is_raised_by_user(error):
                _offload_after_failure(pipe, placement)
                raise
            message = first_line(error)
            # Python's own error is about the memory of this process, which other processes do not share.
            is_from_device = is_from_device and not isinstance(error, MemoryError)
            clear_traceback_frames(error)
        else:
            if attempt:
                placement.call_plans[shape_of(request)] = CallPlan(decision)
                if is_from_device:
                    save_outcome(_outcome_key(pipe, placement, request), rule, find_capacity(pipe, placement))
            return result
        # Outside of the except block: while it is active, the exception keeps the frames of the call alive.
        forget_captured_graphs(pipe)
        if placement.residence != "resident":
            placement.residence = None  # the interrupted call left some models on the device
        free_memory(placement)
        _LOG.warning("anyaccel: out of memory with %s at %s; trying the next memory mode", rule, shape_of(request))
    _restore(pipe, placement, before)
    raise make_does_not_fit_error(pipe, placement, request, f"every memory mode ran out of memory: {message}")


def _is_raised_by_user(error: BaseException) -> bool:
    """Return whether a `raise` statement outside of torch, diffusers and the vendor's libraries raised an error."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None:
        frames = frames.tb_next
    if frames is None:
        return False
    if is_library(str(frames.tb_frame.f_globals.get("__name__"))):
        return False
    # Operations of torch have no frames, so the innermost frame is the user's code in two cases: it raised the error,
    # or one of its operations ran out of memory. Only the instruction tells them apart. What does not work instead:
    # - The innermost frame alone: an operation that runs out of memory in a user's pipeline would not be retried.
    # - The type or message of the error: vendors use a plain RuntimeError with any text, and so can the user.
    # - The source line: there is none in `exec`, `python -c` and frozen applications, and one line may contain both.
    # The slice is empty for frames without bytecode, such as those of Cython on Python 3.10.
    last = frames.tb_lasti
    return frames.tb_frame.f_code.co_code[last : last + 1] == bytes([opmap["RAISE_VARARGS"]])


def _skip_useless_splits(pipe: Any, placement: Placement, rules: list[MemoryRule]) -> Iterator[MemoryRule]:
    """Yield the rules; if the models cannot be split, leave out those that only split the batch."""
    tried: set[MemoryRule] = set()
    for rule in rules:
        # If the plan requires a split, the models that support it are split.
        splits = rule.images_per_call is not None and placement.plan.images_per_call.value is None
        if splits and find_split_obstacle(find_denoisers(pipe, placement)):
            rule = replace(rule, images_per_call=None)
        if rule not in tried:
            tried.add(rule)
            yield rule


def _stream_new_weights(pipe: Any, placement: Placement) -> None:
    """Include newly added parameters in streaming."""
    if placement.residence == "layer" and has_unstreamed_weights(pipe):
        move_weights(pipe, placement, "layer")


def remove_offload_hooks(pipe: Any, placement: Placement) -> None:
    """Move offloaded weights to the CPU and remove the hooks; the next call installs them again."""
    if placement.residence != "resident" and not placement.offloaded_by_user:
        placement.residence = None
        move_to_cpu(pipe)


@contextmanager
def weights_on_cpu(pipe: Any) -> Iterator[None]:
    """Move offloaded weights to the CPU for the duration of the `with` block, then offload them again."""
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


def _offload_after_failure(pipe: Any, placement: Placement) -> None:
    """Offload the weights that an interrupted call left on the device."""
    if placement.residence != "resident" and not placement.offloaded_by_user:
        end_phase(pipe, failed=True)


def _choose_rule(pipe: Any, placement: Placement, request: CallRequest, rules: list[MemoryRule]) -> CallPlan:
    """Return the memory plan for a call, from an earlier call, a stored outcome or a new forecast."""
    shape = shape_of(request)
    if placement.plan.parallel.value is not None:
        return CallPlan(Decision(rules[0], placement.weights_rule.reason))
    earlier = placement.call_plans.get(shape)
    if earlier is not None and earlier.decision.value in rules:
        return earlier
    outcome = (
        load_outcome(_outcome_key(pipe, placement, request), find_capacity(pipe, placement)) if has_outcome() else None
    )
    if outcome in rules:
        chosen = CallPlan(Decision(outcome, "faster memory modes ran out of memory in an earlier call with this shape"))
    else:
        chosen = plan_call(pipe, placement, request, rules)
    placement.call_plans[shape] = chosen
    return chosen


# Stored on disk: a change of this text makes existing outcomes unreadable.
def _outcome_key(pipe: Any, placement: Placement, request: CallRequest) -> str:
    facts = read_facts(pipe)
    weights = ", ".join(
        f"{component.name} {component.parameters}" + f" ({component.packed_bytes} bytes)" * bool(component.packed_bytes)
        for component in facts.components
    )
    device = f"{placement.plan.title} {placement.opened.driver.device_name(placement.opened.index)}"
    return f"{device} | {facts.pipeline}: {weights} | {placement.plan.dtype.value} | {shape_of(request)}"


def _images_per_call(placement: Placement, rule: MemoryRule) -> int | None:
    limits = [limit for limit in (rule.images_per_call, placement.plan.images_per_call.value) if limit is not None]
    return min(limits, default=None)


def apply_rule(pipe: Any, placement: Placement, decision: Decision[MemoryRule], call: CallPlan | None = None) -> None:
    """Apply memory settings to a pipeline: memory mode, VAE tiling and attention slicing."""
    rule = decision.value
    if rule.residence != placement.residence:
        move_weights(pipe, placement, rule.residence)
    if rule.savings.vae_in_parts != placement.vae_in_parts:
        set_vae_tiling(pipe, rule.savings.vae_in_parts)
        placement.vae_in_parts = rule.savings.vae_in_parts
    sheet, plan = placement.opened.sheet, placement.plan
    attention = plan.attention
    if rule.savings.sliced_attention:
        options = replace(placement.options, attention_slicing="max")
        attention = choose_attention(sheet, options, int(getattr(torch, plan.dtype.value).itemsize))
        attention = replace(attention, reason="attention over all heads at the same time does not fit in memory")
    report = placement.report
    report.memory = None if decision == plan.memory else decision
    report.forecast = call.forecast if call else None
    if attention.value != placement.call_plan.attention.value:
        workarounds = choose_workarounds(sheet, plan.replacements.value, attention.value)
        placement.call_plan = replace(plan, attention=attention, workarounds=workarounds)
        set_input_adapters(find_components(pipe), placement.call_plan, placement.device)


def move_weights(pipe: Any, placement: Placement, residence: Residence) -> None:
    """Switch a pipeline to another memory mode, after removing compiled code and captured graphs."""
    placement.residence = None  # unknown if the move is interrupted
    remove_speedups(pipe, placement)
    move_to_cpu(pipe)  # outside of the function mode, which moves CPU tensors to a device that may be full
    map_offloaded_weights(pipe, residence, placement.opened)
    with make_pipeline_function_mode(placement.plan, placement.device):
        set_residence(pipe, residence, placement.device, placement.opened)
    placement.residence = residence
    record_placed_models(find_models(pipe).values(), placement)


def _restore(pipe: Any, placement: Placement, before: Decision[MemoryRule]) -> None:
    """Restore the memory settings that were used before a failed call.

    If they no longer fit, leave the weights on the CPU.
    """
    free_memory(placement)
    try:
        apply_rule(pipe, placement, before)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        clear_traceback_frames(error)
        free_memory(placement)


def clear_traceback_frames(error: BaseException) -> None:
    """Clear the local variables in an exception's traceback, including those of chained exceptions."""
    # A traceback references its frames, and they reference tensors on the device:
    # https://github.com/pytorch/pytorch/issues/27600
    current: BaseException | None = error
    while current is not None:
        traceback.clear_frames(current.__traceback__)
        current = current.__cause__ or current.__context__


def free_memory(placement: Placement) -> None:
    """Free unreachable tensors and empty the device's memory cache."""
    release_unreachable()
    try:
        placement.opened.driver.empty_cache()
    except (AnyaccelError, RuntimeError):
        return
