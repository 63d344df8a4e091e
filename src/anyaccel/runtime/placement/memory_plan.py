"""Memory: what a call will hold is worked out before it runs, and the pipeline is brought into the shape that fits."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from anyaccel.backends.torch_device import is_on
from anyaccel.errors import DoesNotFitError, NotMeasurableError
from anyaccel.planning.decision import Decision
from anyaccel.planning.kernel_workspace import read_workspace
from anyaccel.planning.memory import (
    Forecast,
    MemoryRule,
    Residence,
    choose_residence,
    list_residences,
    list_rules,
    make_forecast,
)
from anyaccel.planning.options import PlacementOptions
from anyaccel.planning.parallel import weigh_rank
from anyaccel.runtime.batch_split import split_request
from anyaccel.runtime.call_request import CallRequest, shape_of
from anyaccel.runtime.introspection import find_components, read_facts
from anyaccel.runtime.placement_state import Placement
from anyaccel.tracing.footprint_measurement import Measurement
from anyaccel.tracing.meta_clone import clone_pipeline
from anyaccel.tracing.meta_module import map_tensors
from anyaccel.tracing.pipeline_trace import PipelineTrace
from anyaccel.units import readable

__all__ = [
    "find_capacity",
    "find_default_side",
    "has_parts",
    "list_call_rules",
    "list_pipeline_residences",
    "list_pipeline_rules",
    "plan_call",
    "plan_weights",
]

_LOG = logging.getLogger(__name__)
_MOST_A_PIXEL = 16 * 2**10
"""Bytes that no picture needs a pixel in half precision: six times what decoding holds."""
_USUAL_SIDE = 1024
_TINY = 4096
"""A model whose weights are this part of the memory does not fill it with one picture."""
_USUAL_FRAMES = 96
_HEADS, _PIXELS_A_TOKEN = 24, 64
_NO_SHAPE = ("generator", "callback", "callback_on_step_end", "callback_on_step_end_tensor_inputs")
"""Arguments that no shape depends on, and that a trial run must not touch."""


@dataclass(frozen=True)
class CallPlan:
    """How one call is to be run, as far as memory is concerned."""

    decision: Decision[MemoryRule]
    forecast: Forecast | None = None
    """What it will hold; None where it was not worked out."""


def find_capacity(pipe: Any, placement: Placement) -> int | None:
    """The bytes that this pipeline can have on its device now; None where the device does not tell.

    What it holds there already counts as its own.
    """
    driver = placement.opened.driver
    try:
        driver.empty_cache()
        free = driver.memory(placement.opened.index).free_bytes
    except NotMeasurableError:
        return None
    return free + sum(_held_on(placement.device, part) for part in find_components(pipe).values())


def _held_on(device: torch.device, part: Any) -> int:
    if not isinstance(part, torch.nn.Module):
        return 0
    tensors = {id(tensor): tensor for tensor in (*part.parameters(), *part.buffers())}
    return sum(
        tensor.numel() * tensor.element_size() for tensor in tensors.values() if is_on(tensor.device, device.type)
    )


def find_default_side(pipe: Any) -> int:
    """The side of the picture that a pipeline makes unless told otherwise; 1024 where it does not say."""
    scale = getattr(pipe, "vae_scale_factor", None)
    scale = scale if isinstance(scale, int) else 1  # without an autoencoder, what is denoised is the picture
    models = [getattr(pipe, name, None) for name in ("unet", "transformer")]
    sizes = [getattr(pipe, "default_sample_size", None)]
    sizes += [getattr(getattr(model, "config", None), "sample_size", None) for model in models]
    found = next((size for size in sizes if isinstance(size, int)), None)
    return _USUAL_SIDE if found is None else found * scale


def has_parts(pipe: Any) -> bool:
    """Whether a model of the pipeline can take its pictures one by one or in tiles."""
    parts = find_components(pipe).values()
    return any(isinstance(part, torch.nn.Module) and hasattr(part, "enable_tiling") for part in parts)


def list_pipeline_residences(pipe: Any, placement: Placement) -> tuple[Residence, ...]:
    """Where the weights of a pipeline can be on its device, the fastest first."""
    return _list_residences(pipe, placement.opened.sheet.unified_memory)


def _list_residences(pipe: Any, unified_memory: bool) -> tuple[Residence, ...]:
    can_offload = getattr(pipe, "model_cpu_offload_seq", None) is not None
    return list_residences(unified_memory=unified_memory, can_offload=can_offload)


def list_pipeline_rules(
    pipe: Any,
    images: int,
    at_once: int | None,
    options: PlacementOptions,
    *,
    unified_memory: bool,
) -> list[MemoryRule]:
    """The ways in which a pipeline could make so many images, the cheapest first.

    `at_once` is how many a call may make, None for as many as fit: where it is given, no rule splits them further.
    """
    whole = at_once is not None and at_once >= images
    options = replace(options, images_per_call=None if whole else at_once)
    residences = _list_residences(pipe, unified_memory)
    rules = list_rules(1 if whole else images, options, residences, has_parts=has_parts(pipe))
    return list(dict.fromkeys(rules))


def list_call_rules(pipe: Any, placement: Placement, images: int) -> list[MemoryRule]:
    """The ways in which a pipeline could run a call of so many images, the cheapest first."""
    options = placement.options
    if placement.offloaded_by_user:  # where the weights are was decided
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
    """Where the weights go before a size is known; a pin that cannot hold is refused."""
    split = placement.plan.parallel.value
    weights = {
        component.name: weigh_rank(component, split) * _bytes_of(component.name, placement)
        for component in read_facts(pipe).components
    }
    capacity = find_capacity(pipe, placement)
    whole = split is not None and split.strategy == "tensor"  # what is split cannot come and go
    pinned, unified = "resident" if whole else placement.options.memory, placement.opened.sheet.unified_memory
    if capacity is None:
        reason = "asked for" if pinned else "the device does not tell how much memory it has"
        return Decision(MemoryRule(pinned or "resident"), reason)  # type: ignore[arg-type]
    total = sum(weights.values())
    if pinned == "resident" and total > capacity:
        raise DoesNotFitError(
            f"memory='resident' was asked for: the weights of {type(pipe).__name__} are {readable(total)}, and "
            f"{placement.plan.device} has {readable(capacity)}",
            hint=f"leave memory out, or ask for memory='{'phase' if unified else 'component'}'",
        )
    if pinned:
        reason = f"asked for; weights {readable(total)} of {readable(capacity)}"
        return Decision(MemoryRule(pinned), reason)  # type: ignore[arg-type]
    return choose_residence(weights, capacity, list_pipeline_residences(pipe, placement))


def _bytes_of(name: str, placement: Placement) -> int:
    dtype = placement.component_dtypes.get(name, placement.plan.dtype.value)
    return int(getattr(torch, dtype).itemsize)


def plan_call(pipe: Any, placement: Placement, request: CallRequest, rules: list[MemoryRule]) -> CallPlan:
    """The first rule that fits a call; where nothing can be worked out, the one that the weights suggest."""
    capacity = find_capacity(pipe, placement)
    usual = _find_usual(placement.weights_rule, rules)
    if capacity is None or (usual.value == rules[0] and _is_sure(pipe, placement, request, capacity)):
        return CallPlan(usual)
    try:
        measure = _make_measurement(pipe, placement, request)
        decision, forecast = make_forecast(measure, request.images, capacity, rules)
    except Exception as error:  # noqa: BLE001 - any pipeline may be asked; what cannot be traced is run and looked at
        _LOG.debug("anyaccel: %s cannot be traced: %r", type(pipe).__name__, error)
        return CallPlan(Decision(usual.value, f"{usual.reason}; this call cannot be traced ahead of time"))
    if decision.value is None:
        raise does_not_fit(pipe, placement, request, decision.reason, rules, capacity)
    return CallPlan(Decision(decision.value, decision.reason), forecast)


def _find_usual(weights_rule: Decision[MemoryRule], rules: list[MemoryRule]) -> Decision[MemoryRule]:
    """The first rule that leaves the weights where they were put, with all that is pinned."""
    wanted = weights_rule.value.residence
    rule = next((rule for rule in rules if rule.residence == wanted), rules[0])
    return Decision(rule, weights_rule.reason)


def does_not_fit(
    pipe: Any,
    placement: Placement,
    request: CallRequest,
    reason: str,
    rules: list[MemoryRule] | None = None,
    capacity: int | None = None,
) -> DoesNotFitError:
    """The error for a call that no rule fits, with a smaller size that does."""
    best = _find_smaller(pipe, placement, request, rules, capacity) if rules and capacity else None
    hint = f"a size that fits is {best[0]} × {best[1]}" if best else "take a device with more memory"
    return DoesNotFitError(
        f"{type(pipe).__name__} at {shape_of(request)} does not fit on {placement.plan.device}: {reason}", hint=hint
    )


def _find_smaller(
    pipe: Any, placement: Placement, request: CallRequest, rules: list[MemoryRule], capacity: int
) -> tuple[int, int] | None:
    """Return the first size that fits of 3/4, 1/2, 3/8 and 1/4 of each side, or None."""
    width, height = request.arguments.get("width"), request.arguments.get("height")
    multiple = 2 * getattr(pipe, "vae_scale_factor", 8)
    for share in (3 / 4, 1 / 2, 3 / 8, 1 / 4):
        if not isinstance(width, int) or not isinstance(height, int) or not isinstance(multiple, int):
            return None
        size = tuple(max(multiple, int(side * share) // multiple * multiple) for side in (width, height))
        smaller = request.with_arguments(width=size[0], height=size[1])
        try:
            decision, _ = make_forecast(_make_measurement(pipe, placement, smaller), request.images, capacity, rules)
        except Exception:  # noqa: BLE001 - a size that the pipeline refuses is none to advise
            continue
        if decision.value is not None:
            return size[0], size[1]
    return None


def _is_sure(pipe: Any, placement: Placement, request: CallRequest, capacity: int) -> bool:
    """Whether a call fits by so much that it need not be worked out."""
    plan = placement.plan
    element = int(getattr(torch, plan.dtype.value).itemsize)
    weights = sum(component.parameters for component in read_facts(pipe).components) * element
    width, height = request.arguments.get("width"), request.arguments.get("height")
    side = find_default_side(pipe)
    pixels = (width if isinstance(width, int) else side) * (height if isinstance(height, int) else side)
    frames = request.arguments.get("num_frames", _USUAL_FRAMES if "num_frames" in request.accepts else 1)
    pixels *= request.images * (frames if isinstance(frames, int) else _USUAL_FRAMES)
    if placement.weights_rule.value.residence != "resident":
        return False
    if weights * _TINY <= capacity and pixels <= _USUAL_SIDE**2:
        return True
    held = pixels * _MOST_A_PIXEL * element // 2
    if not read_workspace(placement.opened.sheet).fused_attention:
        tokens = math.ceil(pixels / _PIXELS_A_TOKEN)
        held += 2 * _HEADS * tokens**2 * 2 * 4
    return weights + held <= capacity


def _make_measurement(pipe: Any, placement: Placement, request: CallRequest) -> Measurement:
    traced = PipelineTrace()
    clone = clone_pipeline(pipe, type(pipe)._plain_class, traced)

    def arguments(images: int) -> dict[str, Any]:
        part = split_request(request, images)[0]
        kept = {name: value for name, value in part.arguments.items() if name not in _NO_SHAPE}
        return map_tensors(kept, _to_host)  # type: ignore[no-any-return]

    width, height = request.arguments.get("width"), request.arguments.get("height")
    return Measurement(
        clone,
        traced,
        read_workspace(placement.opened.sheet, virtual=placement.plan.virtual),
        denoisers=read_facts(pipe).denoisers,
        arguments=arguments,
        attention=placement.plan.attention.value,
        unified_memory=placement.opened.sheet.unified_memory,
        fetches_ahead=placement.opened.driver.marks,
        size=(width, height) if isinstance(width, int) and isinstance(height, int) else None,
    )


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype)
