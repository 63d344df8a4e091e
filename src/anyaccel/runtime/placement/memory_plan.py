"""Memory planning: predict a call's peak memory and choose the fastest settings that fit."""

from __future__ import annotations

import logging
import math
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch

from anyaccel.backends.device_type_checks import is_on
from anyaccel.errors import DoesNotFitError, NotMeasurableError
from anyaccel.planning.decision import Decision
from anyaccel.planning.kernel_workspace import read_workspace
from anyaccel.planning.memory import (
    Forecast,
    MemoryRule,
    Residence,
    choose_residence,
    describe_weights_need,
    list_residences,
    list_rules,
    make_forecast,
)
from anyaccel.planning.options import PlacementOptions
from anyaccel.planning.parallel import count_rank_bytes
from anyaccel.runtime.call_request import CallRequest, shape_of
from anyaccel.runtime.introspection import find_components, list_denoisers, plain_class, read_facts
from anyaccel.runtime.library_code import find_user_code_in_call
from anyaccel.runtime.placement.mapped_weights import is_mapped
from anyaccel.runtime.placement.row_split import split_traced_rows
from anyaccel.runtime.placement_state import Placement
from anyaccel.tracing.footprint_measurement import Measurement
from anyaccel.tracing.meta_clone import clone_pipeline
from anyaccel.tracing.meta_module import map_tensors
from anyaccel.tracing.pipeline_trace import PipelineTrace
from anyaccel.units import readable
from anyaccel.upstream.torch_internals import assume_all_nonzero

__all__ = [
    "find_capacity",
    "find_default_side",
    "find_sample_side",
    "forecast_call",
    "list_call_rules",
    "list_pipeline_residences",
    "list_pipeline_rules",
    "plan_call",
    "plan_weights",
    "supports_tiling",
]

_LOG = logging.getLogger(__name__)
# The constants below are generous upper bounds. A call that fits even with them is not traced.
# Activation bytes per pixel in half precision: six times what decoding needs.
_MAX_BYTES_PER_PIXEL = 16 * 2**10
_DEFAULT_SIDE = 1024
# A model with weights below 1/4096 of the memory cannot fill it with one image.
_TINY_FRACTION = 4096
_DEFAULT_FRAMES = 96
_HEADS, _PIXELS_PER_TOKEN = 24, 64
# Parts of the names of arguments that do not affect shapes. A trace must not use them: it would advance generators and
# call user code.
_SHAPELESS_ARGUMENTS = ("callback", "generator")


@dataclass(frozen=True)
class CallPlan:
    """The memory settings chosen for one call, with the predicted memory use."""

    decision: Decision[MemoryRule]
    forecast: Forecast | None = None
    """The predicted memory; None if the call was not traced."""


def find_capacity(pipe: Any, placement: Placement) -> int | None:
    """Return the bytes available to a pipeline on its device, or None if they cannot be measured.

    Memory that the pipeline's weights already use on the device counts as available.
    """
    driver = placement.opened.driver
    try:
        driver.empty_cache()
        free = driver.memory(placement.opened.index).free_bytes
    except NotMeasurableError:
        return None
    # The operating system counts clean pages of mapped weights as free.
    return free + sum(_bytes_on(placement.device, component) for component in find_components(pipe).values())


def _bytes_on(device: torch.device, component: Any) -> int:
    if not isinstance(component, torch.nn.Module):
        return 0
    tensors = {id(tensor): tensor for tensor in (*component.parameters(), *component.buffers())}
    return sum(
        tensor.numel() * tensor.element_size()
        for tensor in tensors.values()
        if is_on(tensor.device, device.type) and not is_mapped(tensor)
    )


def find_default_side(pipe: Any) -> int:
    """Return the default side length of a pipeline's images in pixels, or 1024 if there is no default."""
    return find_sample_side(pipe) or _DEFAULT_SIDE


def find_sample_side(pipe: Any) -> int | None:
    """Return the side length in pixels of the images that a pipeline's denoiser was trained on, or None."""
    scale = getattr(pipe, "vae_scale_factor", None)
    scale = scale if isinstance(scale, int) else 1  # without an autoencoder the denoiser works on pixels
    models = [getattr(pipe, name, None) for name in ("unet", "transformer")]
    sizes = [getattr(pipe, "default_sample_size", None)]
    sizes += [getattr(getattr(model, "config", None), "sample_size", None) for model in models]
    sample_size = next((size for size in sizes if isinstance(size, int)), None)
    return None if sample_size is None else sample_size * scale


def supports_tiling(pipe: Any) -> bool:
    """Return whether any model in the pipeline, such as the VAE, supports tiling."""
    components = find_components(pipe).values()
    return any(
        isinstance(component, torch.nn.Module) and hasattr(component, "enable_tiling") for component in components
    )


def list_pipeline_residences(pipe: Any, placement: Placement) -> tuple[Residence, ...]:
    """Return the memory modes that a pipeline supports on its device, fastest first."""
    return _list_residences(pipe, placement.opened.sheet.unified_memory)


def _list_residences(pipe: Any, unified_memory: bool) -> tuple[Residence, ...]:
    # diffusers raises in enable_model_cpu_offload for pipelines without this attribute.
    can_offload = getattr(pipe, "model_cpu_offload_seq", None) is not None
    return list_residences(unified_memory=unified_memory, can_offload=can_offload)


def list_pipeline_rules(
    pipe: Any,
    images: int,
    images_per_call: int | None,
    options: PlacementOptions,
    *,
    unified_memory: bool,
) -> list[MemoryRule]:
    """Return the memory settings to try when generating `images` images, fastest first.

    `images_per_call` is the number of images at a time that the plan requires. None allows
    settings that split the batch.
    """
    whole = images_per_call is not None and images_per_call >= images
    options = replace(options, images_per_call=None if whole else images_per_call)
    residences = _list_residences(pipe, unified_memory)
    # One image if the batch must stay whole: for one image no rule splits.
    rules = list_rules(1 if whole else images, options, residences, supports_tiling=supports_tiling(pipe))
    return list(dict.fromkeys(rules))


def list_call_rules(pipe: Any, placement: Placement, images: int) -> list[MemoryRule]:
    """Return the memory settings to try for a call that generates `images` images, fastest first."""
    options = placement.options
    if placement.offloaded_by_user:  # the user chose the residence
        options = replace(options, memory=placement.residence)
    plan = placement.plan
    return list_pipeline_rules(
        pipe,
        images,
        plan.images_per_call.value,
        options,
        unified_memory=placement.opened.sheet.unified_memory,
    )


def plan_weights(pipe: Any, placement: Placement) -> Decision[MemoryRule]:
    """Return the memory settings for a pipeline's weights, before any image size is known.

    Raise `DoesNotFitError` if all weights must be on the device and do not fit.
    """
    split = placement.plan.parallel.value
    weights = {
        component.name: count_rank_bytes(component, split, _bytes_per_parameter(component.name, placement))
        for component in read_facts(pipe).components
    }
    capacity = find_capacity(pipe, placement)
    is_sharded = split is not None and split.strategy == "tensor"  # sharded weights cannot be offloaded
    requested, unified = "resident" if is_sharded else placement.options.memory, placement.opened.sheet.unified_memory
    why = "sharded weights stay on the device" if is_sharded else f"memory={requested!r} was requested"
    if capacity is None:
        reason = why if requested else "the device does not report its memory size"
        return Decision(MemoryRule(requested or "resident"), reason)  # type: ignore[arg-type]
    total = sum(weights.values())
    if requested == "resident" and total > capacity:
        # Sharded weights cannot be offloaded, so another memory mode would not help.
        option = f"parallel='{split}'" if is_sharded else "memory='resident'"
        other = "phase" if unified else "component"
        raise DoesNotFitError(
            f"{type(pipe).__name__} does not fit with {option}: its weights require {readable(total)}, but "
            f"{placement.plan.device} has only {readable(capacity)}",
            hint="use more devices" if is_sharded else f"omit memory, or use memory='{other}'",
        )
    if requested:
        reason = f"{why}; {describe_weights_need(total, capacity)}"
        return Decision(MemoryRule(requested), reason)  # type: ignore[arg-type]
    return choose_residence(weights, capacity, list_pipeline_residences(pipe, placement))


def _bytes_per_parameter(name: str, placement: Placement) -> int:
    dtype = placement.component_dtypes.get(name, placement.plan.dtype.value)
    return int(getattr(torch, dtype).itemsize)


def plan_call(pipe: Any, placement: Placement, request: CallRequest, rules: list[MemoryRule]) -> CallPlan:
    """Return the first of the given memory settings that is predicted to fit a call.

    If the call cannot be traced, return the settings planned for the weights. Raise `DoesNotFitError`
    if no settings fit.
    """
    capacity = find_capacity(pipe, placement)
    default = _find_default_rule(placement.weights_rule, rules)
    # Tracing takes seconds, so calls that obviously fit are not traced.
    if capacity is None or (default.value == rules[0] and _fits_easily(pipe, placement, request, capacity)):
        return CallPlan(default)
    try:
        measure = _make_measurement(pipe, placement, request)
        decision, forecast = make_forecast(measure, request.images, capacity, rules)
    except Exception as error:  # noqa: BLE001 - pipelines run arbitrary code; a call that cannot be traced is just run
        _LOG.debug("anyaccel: cannot trace %s: %r", type(pipe).__name__, error)
        cause = f", because {error.message}" if isinstance(error, NotMeasurableError) else ""
        reason = f"{default.reason}; the memory use of this call cannot be predicted{cause}"
        return CallPlan(Decision(default.value, reason))
    if decision.value is None:
        raise make_does_not_fit_error(pipe, placement, request, decision.reason, rules, capacity)
    return CallPlan(Decision(decision.value, decision.reason), forecast)


def forecast_call(pipe: Any, placement: Placement, request: CallRequest) -> Forecast:
    """Return the predicted memory use of a call with the planned memory mode.

    Unlike `plan_call`, this also traces calls that obviously fit, and calls with boolean indexing. It assumes that
    such an index selects every element, so the prediction can be too high.
    """
    rules = list_call_rules(pipe, placement, request.images)
    rule = _find_default_rule(placement.weights_rule, rules).value
    capacity = find_capacity(pipe, placement)
    measure = _make_measurement(pipe, placement, request)
    with assume_all_nonzero():
        return make_forecast(measure, request.images, sys.maxsize if capacity is None else capacity, [rule])[1]


def _find_default_rule(weights_rule: Decision[MemoryRule], rules: list[MemoryRule]) -> Decision[MemoryRule]:
    """Return the first of the given memory settings that uses the memory mode planned for the weights."""
    residence = weights_rule.value.residence
    rule = next((rule for rule in rules if rule.residence == residence), rules[0])
    return Decision(rule, weights_rule.reason)


def make_does_not_fit_error(
    pipe: Any,
    placement: Placement,
    request: CallRequest,
    reason: str,
    rules: list[MemoryRule] | None = None,
    capacity: int | None = None,
) -> DoesNotFitError:
    """Return the error for a call that does not fit; its hint names a smaller size that fits, if any."""
    smaller = _find_smaller(pipe, placement, request, rules, capacity) if rules and capacity else None
    hint = (
        f"use {smaller[0]} × {smaller[1]}, which fits"
        if smaller
        else "use a device with more memory, or a smaller image size"
    )
    return DoesNotFitError(
        f"{type(pipe).__name__} at {shape_of(request)} does not fit on {placement.plan.device}: {reason}", hint=hint
    )


def _find_smaller(
    pipe: Any, placement: Placement, request: CallRequest, rules: list[MemoryRule], capacity: int
) -> tuple[int, int] | None:
    """Try image sizes scaled by 3/4, 1/2, 3/8 and 1/4; return the first that fits, or None."""
    width, height = request.arguments.get("width"), request.arguments.get("height")
    multiple = 2 * getattr(pipe, "vae_scale_factor", 8)
    for share in (3 / 4, 1 / 2, 3 / 8, 1 / 4):
        if not isinstance(width, int) or not isinstance(height, int) or not isinstance(multiple, int):
            return None
        size = tuple(max(multiple, int(side * share) // multiple * multiple) for side in (width, height))
        smaller = request.with_arguments(width=size[0], height=size[1])
        try:
            decision, _ = make_forecast(_make_measurement(pipe, placement, smaller), request.images, capacity, rules)
        except Exception:  # noqa: BLE001 - the pipeline does not support this size
            continue
        if decision.value is not None:
            return size[0], size[1]
    return None


def _fits_easily(pipe: Any, placement: Placement, request: CallRequest, capacity: int) -> bool:
    """Return whether a call certainly fits in device memory, based on a rough upper bound."""
    plan = placement.plan
    element = int(getattr(torch, plan.dtype.value).itemsize)
    weights = sum(component.count_bytes(element) for component in read_facts(pipe).components)
    width, height = request.arguments.get("width"), request.arguments.get("height")
    side = find_default_side(pipe)
    pixels = (width if isinstance(width, int) else side) * (height if isinstance(height, int) else side)
    frames = request.arguments.get("num_frames", _DEFAULT_FRAMES if "num_frames" in request.accepts else 1)
    pixels *= request.images * (frames if isinstance(frames, int) else _DEFAULT_FRAMES)
    if placement.weights_rule.value.residence != "resident":
        return False
    if weights * _TINY_FRACTION <= capacity and pixels <= _DEFAULT_SIDE**2:
        return True
    activations = pixels * _MAX_BYTES_PER_PIXEL * element // 2
    if not read_workspace(placement.opened.sheet).fused_attention:
        # Attention scores are materialized: two float32 copies, and twice the batch for guidance.
        tokens = math.ceil(pixels / _PIXELS_PER_TOKEN)
        activations += 2 * _HEADS * tokens**2 * 2 * 4
    return weights + activations <= capacity


def _make_measurement(pipe: Any, placement: Placement, request: CallRequest) -> Measurement:
    """Return a measurement of a call; raise `NotMeasurableError` if it would run code of the user."""
    shaped = {name: value for name, value in request.arguments.items() if not _is_shapeless(name)}
    code = find_user_code_in_call(pipe, shaped)
    if code:
        raise NotMeasurableError(
            f"{code} is not part of a known library and would run more than once",
            hint="to choose the memory mode yourself, pass memory=",
        )
    traced = PipelineTrace()
    clone = clone_pipeline(pipe, plain_class(pipe), traced)
    denoisers = list_denoisers(pipe)

    def arguments(images: int) -> dict[str, Any]:
        assert images == request.images
        return map_tensors(shaped, _to_zeros)  # type: ignore[no-any-return]

    width, height = request.arguments.get("width"), request.arguments.get("height")
    return Measurement(
        clone,
        traced,
        read_workspace(placement.opened.sheet, virtual=placement.plan.virtual),
        denoisers=denoisers,
        split_rows=split_traced_rows(clone, denoisers),
        arguments=arguments,
        attention=placement.plan.attention.value,
        unified_memory=placement.opened.sheet.unified_memory,
        is_host=placement.opened.sheet.is_host,
        fetches_ahead=placement.opened.driver.has_events,
        size=(width, height) if isinstance(width, int) and isinstance(height, int) else None,
    )


def _is_shapeless(name: str) -> bool:
    return any(part in name for part in _SHAPELESS_ARGUMENTS)


def _to_zeros(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype)
