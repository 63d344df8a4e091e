"""Placement of a pipeline: open the device, create the plan, and move the pipeline as planned."""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from anyaccel.backends.cpu_half_precision_speed import SLOWDOWN_LIMIT, measure_half_precision
from anyaccel.backends.device import OpenDevice, find_device, open_device, read_device
from anyaccel.backends.device import sheet as find_sheet
from anyaccel.backends.device_functions import dtype_name
from anyaccel.backends.device_spec import AUTO
from anyaccel.backends.device_type_checks import is_host
from anyaccel.backends.out_of_memory import is_out_of_memory
from anyaccel.backends.sheet import Sheet
from anyaccel.errors import DoesNotFitError, UsageError, first_line
from anyaccel.library_logging import FLOAT32_ADVICE, drop_log_records
from anyaccel.planning.decision import Decision
from anyaccel.planning.dtype import HALF_PRECISIONS, find_smaller_dtype
from anyaccel.planning.memory import MemoryRule, Residence
from anyaccel.planning.options import PlacementOptions, check_residence, read_options
from anyaccel.planning.plan import Plan, make_plan
from anyaccel.quantized_weights.replace_layers import list_formats
from anyaccel.runtime.distributed.parallel import (
    check_splits,
    count_ranks,
    join_ranks,
    open_rank_device,
    read_ranks,
    split_models,
)
from anyaccel.runtime.introspection import (
    find_components,
    find_models,
    list_denoisers,
    plain_class,
    read_dtype,
    read_facts,
)
from anyaccel.runtime.placement.float32_weights import read_float32_weights, restore_float32_weights
from anyaccel.runtime.placement.group_offload import is_streamed
from anyaccel.runtime.placement.memory_plan import list_pipeline_residences, plan_weights
from anyaccel.runtime.placement.new_models import choose_new_dtype
from anyaccel.runtime.placement.offload import move_to_cpu
from anyaccel.runtime.placement.oom_retry import clear_traceback_frames, free_memory, move_weights
from anyaccel.runtime.placement.quantized_layers import (
    find_models_to_quantize,
    quantize_models,
    replace_unsupported_layers,
)
from anyaccel.runtime.placement.weight_moves import make_move_mode, release_freed_memory, stage_weights
from anyaccel.runtime.placement_state import (
    Placement,
    drop_placement,
    find_options,
    find_placement,
    record_placed_models,
    set_placement,
)
from anyaccel.runtime.speed.apply_speedups import remove_speedups
from anyaccel.runtime.speed.quantize import check_not_quantized
from anyaccel.runtime.workarounds.model_inputs import drop_stale_casts, set_input_adapters
from anyaccel.upstream.torch_internals import allow_half_precision_attention

__all__ = [
    "attach_placement",
    "place_in_smaller_dtype",
    "place_pipeline",
    "plan_pipeline",
    "replan",
    "resolve_device",
]

_LOG = logging.getLogger("anyaccel")

Device = str | int | torch.device | OpenDevice


def resolve_device(device: Device | None, options: PlacementOptions) -> OpenDevice:
    """Set the environment variables that the vendor's software reads, then open the device.

    If `device` is None, open the CPU.
    """
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
    """Set the environment variables that the vendor's software reads, for the rest of the process.

    Raise `UsageError` if the software was already imported with a different value.
    """
    for variable in sheet.variables:
        disabled = variable.switch and not getattr(options, variable.switch)
        if variable.value and not disabled:
            os.environ[variable.name] = variable.value
    chosen = next((mode for mode in sheet.modes if mode.name == options.mode), None)
    for name, value in chosen.settings if chosen else ():
        before = os.environ.get(name)
        # The vendor's software reads it only once, when it is imported.
        if before not in (None, value) and any(module in sys.modules for module in sheet.modules):
            raise UsageError(
                f"mode={options.mode!r} requires {name}={value}, but the software for {sheet.title} was already "
                f"imported with {name}={before}",
                hint=f"set {name}={value} in the environment before the program starts",
            )
        os.environ[name] = value


def plan_pipeline(pipe: Any, opened: OpenDevice, options: PlacementOptions, dtype: Decision[str] | None = None) -> Plan:
    """Return the plan for a loaded pipeline on an open device."""
    facts = read_facts(pipe)
    return make_plan(
        opened.sheet,
        facts,
        options,
        device=f"{opened.sheet.name}:{opened.index}",
        virtual=find_device(opened.sheet.name).virtual,
        dtype=dtype,
        environment=os.environ,
        ranks=read_ranks(opened, facts, options),
    )


def _change_weights(pipe: Any, opened: OpenDevice, options: PlacementOptions, before: Placement | None) -> None:
    """Quantize the weights as requested, and replace the quantized layers that cannot run on the device."""
    unquantized = find_models_to_quantize(pipe, options.weights)
    if unquantized:
        _undo(pipe, before)  # streamed layers cannot be replaced
        try:
            quantize_models(unquantized, options.weights)
        except BaseException:  # including KeyboardInterrupt
            if any(list_formats(model) for model in unquantized.values()):
                drop_placement(pipe)  # its plan describes the weights before
            raise
    replace_unsupported_layers(find_models(pipe), opened.sheet, virtual=find_device(opened.sheet.name).virtual)


class _Cast(NamedTuple):
    """How the dtype of a placement was requested."""

    requested: bool
    """The user passed a dtype."""
    keep_float32: bool
    """Weights that must stay in float32 according to their model class are not cast."""

    @classmethod
    def from_request(cls, dtype: Any) -> _Cast:
        """Return the cast for a requested dtype, or for None."""
        # `place` passes the name of the dtype. In `pipe.to(torch.bfloat16)`, all weights are cast, as in diffusers.
        return cls(dtype is not None, keep_float32=not isinstance(dtype, torch.dtype))


def place_pipeline(
    pipe: Any,
    device: Device | None,
    requested: dict[str, Any],
    move: Any,
    *,
    offloaded: Residence | None = None,
    dtype: Decision[str] | None = None,
) -> None:
    """Plan a pipeline for a device and move it there; `move(device, dtype)` is diffusers' own `to`.

    `offloaded` is the memory mode if the user enabled offloading with a diffusers method. `dtype` is
    the dtype decision if one was already made.
    """
    before = find_placement(pipe)
    cast = _Cast.from_request(requested.get("dtype"))
    dtypes = {name: requested[name] for name in ("dtype", "smallest_dtype") if requested.get(name) is not None}
    requested = {**requested, **{name: dtype_name(dtype) for name, dtype in dtypes.items()}}
    options = read_options(requested, find_options(pipe))
    opened = before.opened if device is None and before else resolve_device(device, options)
    if options.parallel is not None and count_ranks() > 1 and (device is not None or before is None):
        opened = open_rank_device(opened, device)
    # A residence that an earlier placement accepted is not checked again.
    if offloaded is None and (before is None or before.options.memory != options.memory):
        check_residence(options.memory, unified_memory=opened.sheet.unified_memory)
    _change_weights(pipe, opened, options, before)
    earlier = before.loaded if before else {}
    loaded = {name: earlier.get(name) or read_dtype(model) for name, model in find_models(pipe).items()}
    plan = plan_pipeline(pipe, opened, options, dtype)
    plan = plan if cast.requested else _keep_user_dtypes(pipe, plan, before, opened.sheet)
    # Checked before `_undo`, so a rejected placement leaves the earlier one in use.
    check_splits(pipe, plan.parallel.value)
    target = opened.tensor_device
    if before is None or _read_formats(plan) != _read_formats(before.plan):
        check_not_quantized(pipe, "this placement")
    _apply_process_settings(plan, opened)
    if plan.parallel.value is not None:
        join_ranks(opened, plan)
    _undo(pipe, before)
    try:
        placement = _plan_weights(pipe, Placement(opened, target, plan, options, loaded=loaded), offloaded)
        placement.vae_in_parts = before is not None and before.vae_in_parts
        with _dropping_placement_on_error(pipe):
            if offloaded is not None:
                _cast(pipe, placement, target, move, cast)
            else:
                _move(pipe, placement, move, cast)
    except DoesNotFitError as error:
        smaller = None if offloaded else find_smaller_dtype(opened.sheet, plan.dtype.value, options)
        if smaller is None:
            raise
        decision = _explain_smaller_dtype(smaller, plan.dtype.value, error)
        place_pipeline(
            pipe, opened if device is None else device, {**requested, "dtype": smaller}, move, dtype=decision
        )
        return
    attach_placement(pipe, placement, before)
    if opened.sheet.is_host and options.dtype is None:
        _warn_if_slow(plan.dtype.value)
    _capture_graphs(pipe, placement)


def _read_formats(plan: Plan) -> tuple[Any, ...]:
    return plan.quantization.value, plan.dtype.value


def _capture_graphs(pipe: Any, placement: Placement) -> None:
    """Let the vendor's library capture graphs if the plan's mode requires it."""
    plan, opened = placement.plan, placement.opened
    single_rank = plan.parallel.value is None
    if single_rank and any(mode.name == plan.mode.value and mode.captures for mode in opened.sheet.modes):
        _capture(pipe, opened)


def _warn_if_slow(dtype: str) -> None:
    """Log a warning if a half-precision dtype is much slower than float32 on this CPU."""
    slowdown = measure_half_precision().get(dtype, 1.0) if dtype in HALF_PRECISIONS else 1.0
    if slowdown > SLOWDOWN_LIMIT:
        _LOG.warning(
            "anyaccel: %s takes %.0f times as long as float32 on this CPU\nhint: pass dtype='float32'", dtype, slowdown
        )


def _keep_user_dtypes(pipe: Any, plan: Plan, before: Placement | None, sheet: Sheet) -> Plan:
    """Return a plan that keeps the dtypes of models that the user has cast or replaced since the earlier placement."""
    if before is None:
        return plan
    own = dict(before.own_dtypes)
    recovered = before.report.float32_models.value if before.report.float32_models else ()
    for name, model in find_models(pipe).items():
        dtype = read_dtype(model)
        if not _is_placed(name, model, before):
            own[name] = choose_new_dtype(dtype, before)
        elif name not in recovered and before.placed_dtypes.get(name) not in (None, dtype):
            own[name] = dtype
    planned = dict(plan.component_dtypes.value)
    own = {name: sheet.adjusted_dtype(dtype) for name, dtype in own.items() if name not in planned}
    if not own:
        return plan
    changed = {name: dtype for name, dtype in own.items() if dtype != plan.dtype.value}
    reason = f"{', '.join(own)} changed after the pipeline was placed"
    return replace(plan, component_dtypes=Decision((*planned.items(), *changed.items()), reason))


def _is_placed(name: str, model: torch.nn.Module, placement: Placement) -> bool:
    reference = placement.placed.get(name)
    return reference is not None and reference() is model


def _undo(pipe: Any, before: Placement | None) -> None:
    """Remove the earlier placement's speedups and move its offloaded weights to the CPU."""
    remove_speedups(pipe, before)
    offloaded_by_plan = before is not None and before.residence != "resident" and not before.offloaded_by_user
    if offloaded_by_plan or any(is_streamed(model) for model in find_models(pipe).values()):
        if before is not None:
            before.residence = None  # if the new placement fails, the next call moves the weights back
        move_to_cpu(pipe)


@contextmanager
def _dropping_placement_on_error(pipe: Any) -> Iterator[None]:
    """Remove the pipeline's placement if the `with` block raises, because weights may be partly moved."""
    try:
        yield
    except BaseException:  # including KeyboardInterrupt
        drop_placement(pipe)
        raise


def place_in_smaller_dtype(pipe: Any, placement: Placement, error: DoesNotFitError) -> bool:
    """Place a pipeline again in the smaller dtype that `smallest_dtype` allows.

    Return False if there is no such dtype.
    """
    chosen = placement.plan.dtype.value
    smaller = find_smaller_dtype(placement.opened.sheet, chosen, placement.options)
    if smaller is None:
        return False
    pipe.place_with_plan(None, {"dtype": smaller}, _explain_smaller_dtype(smaller, chosen, error))
    return True


def _explain_smaller_dtype(smaller: str, chosen: str, error: DoesNotFitError) -> Decision[str]:
    """Return the decision to use the smaller dtype, with the error as part of its reason."""
    return Decision(smaller, f"allowed by smallest_dtype={smaller!r}; {chosen} does not fit: {error.message}")


def _plan_weights(pipe: Any, draft: Placement, offloaded: Residence | None) -> Placement:
    """Return a copy of a draft placement with a memory decision based on the device's free memory."""
    rule = Decision(MemoryRule(offloaded), "offloading was requested") if offloaded else plan_weights(pipe, draft)
    plan = replace(draft.plan, memory=rule)
    placement = Placement(draft.opened, draft.device, plan, draft.options, loaded=draft.loaded, weights_rule=rule)
    placement.residence, placement.offloaded_by_user = offloaded, offloaded is not None
    return placement


def _move(pipe: Any, placement: Placement, move: Any, cast: _Cast) -> None:
    """Move the weights as the planned memory mode requires; if memory runs out, try the next mode."""
    planned = placement.weights_rule.value.residence
    residences = list_pipeline_residences(pipe, placement)
    for residence in residences[residences.index(planned) :] if planned in residences else (planned,):
        message = ""
        try:
            target = placement.device if residence == "resident" else torch.device("cpu")
            _cast(pipe, placement, target, move, cast)
            placement.residence = "resident"
            if residence != "resident":
                move_weights(pipe, placement, residence)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            message = first_line(error)
            clear_traceback_frames(error)
        else:
            return
        move(torch.device("cpu"), None)
        free_memory(placement)
        reason = f"out of memory with memory='{residence}': {message}"
        following = [other for other in residences if residences.index(other) > residences.index(residence)]
        if not following or placement.options.memory is not None:
            raise DoesNotFitError(
                f"{type(pipe).__name__} does not fit on {placement.plan.device}: {reason}",
                hint=f"{'omit memory, or ' if placement.options.memory else ''}use a device with more memory",
            )
        placement.weights_rule = placement.report.memory = Decision(MemoryRule(following[0]), reason)


def _cast(pipe: Any, placement: Placement, target: torch.device, move: Any, cast: _Cast) -> None:
    """Move a pipeline and cast its models to the planned dtypes."""
    plan = placement.plan
    # Not if all models have the dtype: `to(dtype)` would also cast buffers that `from_pretrained` leaves in float32.
    casts = cast.requested or any(read_dtype(model) != plan.dtype.value for model in find_models(pipe).values())
    kept = read_float32_weights(pipe, plan) if cast.keep_float32 else {}
    advice = drop_log_records(*FLOAT32_ADVICE) if cast.keep_float32 else nullcontext()
    kind: Any = plain_class(pipe)
    mode = make_move_mode(plan, placement.device, find_models(pipe).values(), kind.to)
    with torch.no_grad(), mode, advice:
        dtype = getattr(torch, plan.dtype.value)
        exceptions = dict(plan.component_dtypes.value)
        if plan.parallel.value is not None and plan.parallel.value.strategy == "tensor":
            # Before the move: a rank's device may have no memory for the whole model.
            _cast_denoisers(pipe, plan, dtype)
            split_models(pipe, placement)
        if not casts and target == placement.device:
            stage_weights(find_models(pipe).values(), placement.opened)
        move(target, dtype if casts and not exceptions else None)
        for name, component in find_models(pipe).items() if exceptions else ():
            wanted = getattr(torch, exceptions[name]) if name in exceptions else dtype
            # Some modules of a model that keeps its dtype may have another one. Quantized weights are never cast.
            if wanted.is_floating_point and getattr(torch, read_dtype(component)) != wanted:
                component.to(wanted)
        if not is_host(target):
            release_freed_memory()
        restore_float32_weights(pipe, plan, kept)
        if plan.parallel.value is not None:
            split_models(pipe, placement)


def _cast_denoisers(pipe: Any, plan: Plan, dtype: torch.dtype) -> None:
    """Cast the denoisers on the CPU before their weights are sharded."""
    for name in list_denoisers(pipe):
        if name not in dict(plan.component_dtypes.value):
            getattr(pipe, name).to(dtype)


def _capture(pipe: Any, opened: OpenDevice) -> None:
    """Replace each denoiser with a version that replays a captured device graph, unless already done."""
    for name in list_denoisers(pipe):
        model = getattr(pipe, name)
        if not vars(model).get("_anyaccel_captured"):  # a second placement must not wrap the graph again
            captured = opened.driver.capture(model)
            vars(captured)["_anyaccel_captured"] = True
            setattr(pipe, name, captured)


def replan(pipe: Any, placement: Placement, requested: dict[str, Any]) -> None:
    """Create a new plan for changed options; keep the device, the memory mode and the dtype."""
    options = read_options(requested, placement.options)
    before = placement.plan
    plan = plan_pipeline(pipe, placement.opened, replace(options, dtype=before.dtype.value), before.dtype)
    plan = replace(plan, component_dtypes=before.component_dtypes, memory=before.memory, report=replace(before.report))
    attach_placement(pipe, replace(placement, plan=plan, call_plan=plan, options=options, call_plans={}), placement)


def attach_placement(
    pipe: Any, placement: Placement, before: Placement | None = None, *, inherited: bool = False
) -> None:
    """Attach a placement to a pipeline, and override its models' `forward` methods to adapt inputs.

    `inherited` means that the models were placed by another pipeline.
    """
    if before is not None and before.device == placement.device:
        placement.cache_dir = before.cache_dir
        placement.report.compiled_models = before.report.compiled_models
        placement.report.compiled_sizes = before.report.compiled_sizes
    components = find_components(pipe)
    set_input_adapters(components, placement.plan, placement.device)
    drop_stale_casts(components)
    models = find_models(pipe)
    placement.placed = {name: weakref.ref(model) for name, model in models.items()}
    placement.placed_dtypes = {name: read_dtype(model) for name, model in models.items()}
    placement.denoisers = list_denoisers(pipe)
    set_placement(pipe, placement)
    if not inherited:
        record_placed_models(models.values(), placement)


def _apply_process_settings(plan: Plan, opened: OpenDevice) -> None:
    """Apply the plan's settings that affect the whole process, such as bfloat16 attention."""
    if plan.bf16_attention.value:
        allow_half_precision_attention()
    if plan.capture.value:
        opened.driver.recorder(opened.index)  # imports the vendor's graph module now instead of in the first call
