"""Placing: opening the device, making the plan, and moving the pipeline as the plan says."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from anyaccel.backends.device import OpenDevice, find_device, open_device, read_device
from anyaccel.backends.device import sheet as find_sheet
from anyaccel.backends.device_functions import dtype_name
from anyaccel.backends.device_spec import AUTO
from anyaccel.backends.half_precision_probe import measure_half_precision
from anyaccel.backends.out_of_memory import is_out_of_memory
from anyaccel.backends.sheet import Sheet
from anyaccel.errors import DoesNotFitError, UsageError, first_line
from anyaccel.library_logging import FLOAT32_ADVICE, drop_log_records
from anyaccel.planning.decision import Decision
from anyaccel.planning.dtype import find_smaller_dtype
from anyaccel.planning.memory import MemoryRule, Residence
from anyaccel.planning.options import PlacementOptions, check_residence, read_options
from anyaccel.planning.plan import Plan, make_plan
from anyaccel.runtime.distributed.parallel import (
    check_splits,
    count_ranks,
    join_ranks,
    read_ranks,
    split_models,
    take_own_device,
)
from anyaccel.runtime.introspection import find_components, find_models, read_facts
from anyaccel.runtime.placement.group_offload import is_streamed
from anyaccel.runtime.placement.memory_plan import list_pipeline_residences, plan_weights
from anyaccel.runtime.placement.offload import move_to_cpu
from anyaccel.runtime.placement.oom_retry import clear_traceback_frames, free, move_weights
from anyaccel.runtime.placement_state import Placement, drop_placement, find_options, find_placement, keep_placement
from anyaccel.runtime.speed.quantize import check_not_quantized
from anyaccel.runtime.speed.session import remove_speedups
from anyaccel.runtime.workarounds.function_modes import make_pipeline_function_mode
from anyaccel.runtime.workarounds.model_inputs import drop_stale_casts, set_input_adapters
from anyaccel.upstream import diffusers_internals, transformers_internals
from anyaccel.upstream.torch_internals import allow_half_precision_attention

__all__ = [
    "fall_back_in_dtype",
    "keep_float32",
    "place_newcomers",
    "place_pipeline",
    "plan_pipeline",
    "replan",
    "resolve_device",
    "settle",
]

Device = str | int | torch.device | OpenDevice


def resolve_device(device: Device | None, options: PlacementOptions) -> OpenDevice:
    """Open the device that an argument names, with what the vendor's software reads set before; None is the CPU."""
    if isinstance(device, OpenDevice):
        _set_variables(device.sheet, options)
        return device
    spec = read_device(torch.device("cpu") if device is None else device)
    if spec.virtual:
        from anyaccel.emulator.activation import start_spec

        spec = start_spec(spec)
    if spec.name != AUTO:
        _set_variables(find_sheet(spec), options)
    return open_device(spec)


def _set_variables(sheet: Sheet, options: PlacementOptions) -> None:
    """Set what the vendor's software reads when it is imported or run; these stay for the process."""
    for variable in sheet.variables:
        off = variable.switch and not getattr(options, variable.switch)
        if variable.value and not off:
            os.environ[variable.name] = variable.value
    chosen = next((mode for mode in sheet.modes if mode.name == options.mode), None)
    for name, value in chosen.settings if chosen else ():
        before = os.environ.get(name)
        if before not in (None, value) and any(module in sys.modules for module in sheet.modules):
            raise UsageError(
                f"{sheet.title} was started with {name}={before}, and mode={options.mode!r} needs {value}",
                hint=f"set {name}={value} before the program starts",
            )
        os.environ[name] = value


def plan_pipeline(pipe: Any, opened: OpenDevice, options: PlacementOptions, dtype: Decision[str] | None = None) -> Plan:
    """Return the plan for a pipeline in memory on an open device."""
    on_host = opened.sheet.is_host
    facts = read_facts(pipe)
    measured = measure_half_precision() if on_host and options.dtype is None else None
    return make_plan(
        opened.sheet,
        facts,
        options,
        device=f"{opened.sheet.name}:{opened.index}",
        virtual=find_device(opened.sheet.name).virtual,
        half_precision_cost=measured,
        dtype=dtype,
        environment=os.environ,
        ranks=read_ranks(opened, facts, options),
    )


def place_pipeline(
    pipe: Any,
    device: Device | None,
    asked: dict[str, Any],
    move: Any,
    *,
    offloaded: Residence | None = None,
    dtype: Decision[str] | None = None,
) -> None:
    """Plan a pipeline for a device and move it there; `move(device, dtype)` is the pipeline's own `to`.

    `offloaded` is where the weights will be where the user offloads them by diffusers' own methods. `dtype` is the
    decision about the dtype where the caller made it.
    """
    before = find_placement(pipe)
    types = {name: asked[name] for name in ("dtype", "smallest_dtype") if asked.get(name) is not None}
    asked = {**asked, **{name: dtype_name(dtype) for name, dtype in types.items()}}
    options = read_options(asked, find_options(pipe))
    opened = before.opened if device is None and before else resolve_device(device, options)
    if options.parallel is not None and count_ranks() > 1 and (device is not None or before is None):
        opened = take_own_device(opened, device)
    if offloaded is None and (before is None or before.options.memory != options.memory):  # a new pin must make sense
        check_residence(options.memory, unified_memory=opened.sheet.unified_memory)
    loaded = {component.name: component.dtype for component in read_facts(pipe).components}
    plan = plan_pipeline(pipe, opened, options, dtype)
    check_splits(pipe, plan.parallel.value)
    place = opened.tensor_device
    if before is None or (plan.quantization.value, plan.dtype.value) != (
        before.plan.quantization.value,
        before.plan.dtype.value,
    ):
        check_not_quantized(pipe, "placing it so")
    _execute(plan, opened)
    if plan.parallel.value is not None:
        join_ranks(opened, plan)
    _undo(pipe, before)
    try:
        placement = _plan_weights(pipe, Placement(opened, place, plan, options, loaded=loaded), offloaded)
        placement.vae_in_parts = before is not None and before.vae_in_parts
        with _dropping_placement_on_error(pipe):
            if offloaded is not None:
                _cast(pipe, placement, place, move)
            else:
                _move(pipe, placement, move)
    except DoesNotFitError as error:
        smaller = None if offloaded else find_smaller_dtype(opened.sheet, plan.dtype.value, options)
        if smaller is None:
            raise
        decision = _explain_smaller_dtype(smaller, plan.dtype.value, error)
        place_pipeline(pipe, opened if device is None else device, {**asked, "dtype": smaller}, move, dtype=decision)
        return
    settle(pipe, placement, before)
    alone = plan.parallel.value is None
    if alone and any(mode.name == plan.mode.value and mode.captures for mode in opened.sheet.modes):
        _capture(pipe, opened)


def _undo(pipe: Any, before: Placement | None) -> None:
    """Take the speed-ups of a placement off, and bring weights that wait elsewhere to the host."""
    remove_speedups(pipe, before)
    offloaded_by_plan = before is not None and before.residence != "resident" and not before.offloaded_by_user
    if offloaded_by_plan or any(is_streamed(model) for model in find_models(pipe).values()):
        if before is not None:
            before.residence = None  # if the new placement is refused, the next call brings the weights back
        move_to_cpu(pipe)


@contextmanager
def _dropping_placement_on_error(pipe: Any) -> Iterator[None]:
    """Forget the earlier placement if a move is cut short: some weights may have moved or have another dtype."""
    try:
        yield
    except BaseException:  # also Ctrl-C
        drop_placement(pipe)
        raise


def fall_back_in_dtype(pipe: Any, placement: Placement, error: DoesNotFitError) -> bool:
    """Place a pipeline that does not fit again, in the smaller dtype that its user allows; whether there is one."""
    chosen = placement.plan.dtype.value
    smaller = find_smaller_dtype(placement.opened.sheet, chosen, placement.options)
    if smaller is None:
        return False
    pipe.place_with_plan(None, {"dtype": smaller}, _explain_smaller_dtype(smaller, chosen, error))
    return True


def _explain_smaller_dtype(smaller: str, chosen: str, error: DoesNotFitError) -> Decision[str]:
    """Return the decision for the smaller dtype that the user allows."""
    return Decision(smaller, f"smallest_dtype={smaller!r} allows it, and {chosen} does not fit: {error.message}")


def _plan_weights(pipe: Any, draft: Placement, offloaded: Residence | None) -> Placement:
    """Complete a draft with the decision where the weights go, which needs the device's free memory."""
    rule = Decision(MemoryRule(offloaded), "requested") if offloaded else plan_weights(pipe, draft)
    plan = replace(draft.plan, memory=rule)
    placement = Placement(draft.opened, draft.device, plan, draft.options, loaded=draft.loaded, weights_rule=rule)
    placement.residence, placement.offloaded_by_user = offloaded, offloaded is not None
    return placement


def _move(pipe: Any, placement: Placement, move: Any) -> None:
    """Bring the weights to where they are to be; where memory runs out on the way, to the next place."""
    wanted = placement.weights_rule.value.residence
    residences = list_pipeline_residences(pipe, placement)
    for residence in residences[residences.index(wanted) :] if wanted in residences else (wanted,):
        words = ""
        try:
            _cast(pipe, placement, placement.device if residence == "resident" else torch.device("cpu"), move)
            placement.residence = "resident"
            if residence != "resident":
                move_weights(pipe, placement, residence)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            words = first_line(error)
            clear_traceback_frames(error)
        else:
            return
        move(torch.device("cpu"), None)
        free(placement)
        reason = f"{residence} ran out of memory: {words}"
        following = [other for other in residences if residences.index(other) > residences.index(residence)]
        if not following or placement.options.memory is not None:
            raise DoesNotFitError(
                f"{type(pipe).__name__} does not fit on {placement.plan.device}: {reason}",
                hint="take a device with more memory",
            )
        placement.weights_rule = placement.report.memory = Decision(MemoryRule(following[0]), reason)


def _cast(pipe: Any, placement: Placement, place: torch.device, move: Any) -> None:
    """Move a pipeline, and cast its models to the types that the plan says."""
    plan = placement.plan
    with torch.no_grad(), make_pipeline_function_mode(plan, placement.device), drop_log_records(*FLOAT32_ADVICE):
        dtype = getattr(torch, plan.dtype.value)
        kept = dict(plan.component_dtypes.value)
        if plan.parallel.value is not None and plan.parallel.value.strategy == "tensor":
            _cast_denoisers(pipe, plan, dtype)
            split_models(pipe, placement)
        move(place, None if kept else dtype)
        for name, component in find_components(pipe).items() if kept else ():
            if isinstance(component, torch.nn.Module) and name not in kept:
                component.to(dtype)
        keep_float32(pipe, plan)
        if plan.parallel.value is not None:
            split_models(pipe, placement)


def _cast_denoisers(pipe: Any, plan: Plan, dtype: torch.dtype) -> None:
    """Give the models whose weights are to be split their type while they lie whole on the host."""
    for name in read_facts(pipe).denoisers:
        if name not in dict(plan.component_dtypes.value):
            getattr(pipe, name).to(dtype)


def _capture(pipe: Any, opened: OpenDevice) -> None:
    """Record the models that run at every step as graphs of the device, once."""
    for name in read_facts(pipe).denoisers:
        model = getattr(pipe, name)
        if not vars(model).get("_anyaccel_captured"):
            captured = opened.driver.capture(model)
            vars(captured)["_anyaccel_captured"] = True
            setattr(pipe, name, captured)


def replan(pipe: Any, placement: Placement, asked: dict[str, Any]) -> None:
    """Plan a pipeline anew for new wishes; it stays where it is and in the type that it has."""
    options = read_options(asked, placement.options)
    before = placement.plan
    plan = plan_pipeline(pipe, placement.opened, replace(options, dtype=before.dtype.value), before.dtype)
    plan = replace(plan, component_dtypes=before.component_dtypes, memory=before.memory, report=replace(before.report))
    settle(pipe, replace(placement, plan=plan, call_plan=plan, options=options, call_plans={}), placement)


def settle(pipe: Any, placement: Placement, before: Placement | None = None) -> None:
    """Put the boundaries on a pipeline's models, and remember its placement."""
    if before is not None and before.device == placement.device:
        placement.cache_dir = before.cache_dir
        placement.report.compiled_models = before.report.compiled_models
        placement.report.compiled_sizes = before.report.compiled_sizes
    components = find_components(pipe)
    set_input_adapters(components, placement.plan, placement.device)
    drop_stale_casts(components)
    placement.placed = {name: weakref.ref(model) for name, model in find_models(pipe).items()}
    placement.denoisers = read_facts(pipe).denoisers
    keep_placement(pipe, placement)


def place_newcomers(pipe: Any, placement: Placement) -> None:
    """Place the models that took the place of others since the pipeline was placed."""
    known = {name: found() for name, found in placement.placed.items()}
    new = {name: model for name, model in find_models(pipe).items() if known.get(name) is not model}
    if not new:
        return
    placement.placed |= {name: weakref.ref(model) for name, model in new.items()}
    placement.call_plans.clear()
    facts = read_facts(pipe)
    placement.denoisers = facts.denoisers
    if placement.offloaded_by_user:
        return
    if placement.residence != "resident":
        placement.residence = None  # all are brought to where the next rule wants them
    quantized = {one.name for one in facts.components if one.quantized}
    kept = quantized | set(placement.component_dtypes)
    place = placement.device if placement.residence == "resident" else torch.device("cpu")
    with (
        torch.no_grad(),
        make_pipeline_function_mode(placement.plan, placement.device),
        drop_log_records(*FLOAT32_ADVICE),
    ):
        for name, model in new.items():
            model.to(place) if name in kept else model.to(place, getattr(torch, placement.plan.dtype.value))


def _execute(plan: Plan, opened: OpenDevice) -> None:
    """What a plan switches on for the whole process."""
    if plan.bf16_attention.value:
        allow_half_precision_attention()
    if plan.capture.value:
        opened.driver.recorder(opened.index)  # what it needs is imported now, and not while a picture is waited for


def keep_float32(pipe: Any, plan: Plan) -> None:
    """Some classes name modules that stay in float32 whatever the model runs in, as `from_pretrained` keeps them."""
    if plan.dtype.value == "float32":
        return
    for component in find_components(pipe).values():
        if not isinstance(component, torch.nn.Module):
            continue
        if transformers_internals.is_transformers_model(component):
            narrow = transformers_internals.read_float32_modules(component, plan.dtype.value)
        else:
            narrow = diffusers_internals.read_float32_modules(component)
        for path, module in component.named_modules() if narrow else ():
            if any(name in path.split(".") for name in narrow):
                module.to(torch.float32)
