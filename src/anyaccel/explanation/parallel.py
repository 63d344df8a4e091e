"""Memory and speed benefits of tensor and context parallelism, for `anyaccel.explain`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from anyaccel.errors import UsageError
from anyaccel.explanation.device_argument import DeviceTarget
from anyaccel.planning.decision import Decision
from anyaccel.planning.facts import PipelineFacts
from anyaccel.planning.footprint import Footprint, Measure, MemorySavings, ModelSize
from anyaccel.planning.memory import predict
from anyaccel.planning.options import FLOATING_BYTES, PlacementOptions
from anyaccel.planning.parallel import (
    SINGLE_DEVICE,
    Ranks,
    Split,
    SplitStrategy,
    choose_parallel,
    count_rank_parameters,
)
from anyaccel.units import readable
from anyaccel.upstream.diffusers_internals import read_tensor_parallel_devices

__all__ = ["choose_split", "describe_gain", "split_memory"]

_DEFAULT_DEVICES_PER_SERVER = 8
# Tokens from which attention dominates a step. A 1024 x 1024 image has 4,096, a short video about 32,000.
_LONG_SEQUENCE = 16_384
# Share of the capacity that weights may use; activations need the rest.
_FREE_SHARE = 0.8


def choose_split(
    target: DeviceTarget, facts: PipelineFacts, options: PlacementOptions, dtype: str
) -> Decision[Split | None]:
    """Return the decision on whether and how to split the model across devices.

    With `parallel='auto'`, the model is split across as many devices of one server as possible.
    """
    if options.parallel is None:
        return SINGLE_DEVICE
    weights = sum(component.count_bytes(FLOATING_BYTES[dtype]) for component in facts.components)
    fits = weights <= target.capacity_bytes * _FREE_SHARE
    ranks = Ranks(count=None, tensor_types=read_tensor_parallel_devices(), fits_one_device=fits)
    if options.parallel != "auto":
        return choose_parallel(target.sheet, facts, options, ranks)
    decisions = [
        choose_parallel(target.sheet, facts, options, replace(ranks, count=count))
        for count in reversed(_device_counts(target))
    ]
    # `cfg` always uses two devices, so it says nothing about how far the model itself can be split.
    splits = [decision for decision in decisions if decision.value is not None and decision.value.strategy != "cfg"]
    return splits[0] if splits else decisions[-1]


def split_memory(measure: Measure, facts: PipelineFacts, split: Split | None) -> Measure:
    """Return a `Measure` for one rank of a split model.

    With tensor parallelism, a rank holds its share of the weights and the same activations as a single
    device. With other strategies, `measure` is returned unchanged.
    """
    if split is None or split.strategy != "tensor":
        return measure
    shares = {
        component.name: count_rank_parameters(component, split) / max(1, component.parameters)
        for component in facts.components
    }

    def shard(model: ModelSize) -> ModelSize:
        return replace(model, weights_bytes=int(model.weights_bytes * shares.get(model.name, 1.0)))

    def measure_rank(savings: MemorySavings, images: int, images_per_call: int | None = None, /) -> Footprint:
        footprint = measure(savings, images, images_per_call)
        return replace(footprint, models=tuple(shard(model) for model in footprint.models))

    return measure_rank


def describe_gain(
    target: DeviceTarget,
    facts: PipelineFacts,
    measure: Measure,
    sequences: Mapping[str, int],
    *,
    resident: bool,
    requested: bool,
) -> tuple[str, ...]:
    """Return notes on how `parallel=` would change memory and speed.

    There are no notes if the weights fit on one device, the sequence is short and no split was
    requested.
    """
    denoisers = [component for component in facts.components if component.denoises]
    tokens = max((sequences.get(model.name, 0) for model in denoisers), default=0)
    if not denoisers or (resident and tokens < _LONG_SEQUENCE and not requested) or max(_device_counts(target)) < 2:
        return ()
    notes = [] if resident and not requested else [_format_tensor_note(target, facts, measure)]
    notes.append(_format_context_note(target, facts, measure, tokens))
    return tuple(notes)


def _format_tensor_note(target: DeviceTarget, facts: PipelineFacts, measure: Measure) -> str:
    counts = [count for count in _device_counts(target) if _find_obstacle(target, facts, "tensor", count) is None]
    if not counts:
        return f"parallel='tensor' is not available: {_find_obstacle(target, facts, 'tensor', 2)}"
    total = measure(MemorySavings(), 1)
    # The smallest count with resident weights is the cheapest; otherwise describe the largest one.
    for count in counts:
        rank = split_memory(measure, facts, Split("tensor", count))(MemorySavings(), 1)
        resident = max(predict(rank, "resident").values()) <= target.capacity_bytes
        if resident or count == counts[-1]:
            break
    weights = f"each rank holds {readable(rank.weights_bytes)} of {readable(total.weights_bytes)} of weights"
    outcome = "fits" if resident else "still does not fit"
    return f"parallel='tensor:{count}': {weights}, which {outcome} with memory='resident'"


def _format_context_note(target: DeviceTarget, facts: PipelineFacts, measure: Measure, tokens: int) -> str:
    counts = [count for count in _device_counts(target) if _find_obstacle(target, facts, "context", count) is None]
    if not counts:
        return f"parallel='context' is not available: {_find_obstacle(target, facts, 'context', 2)}"
    count, weights = counts[-1], readable(measure(MemorySavings(), 1).weights_bytes)
    share = f"each rank processes {-(-tokens // count):,} of {tokens:,} tokens" if tokens else "the sequence is split"
    return (
        f"parallel='context:{count}': {share}, which reduces time and activation memory; "
        f"each rank holds all {weights} of weights"
    )


def _device_counts(target: DeviceTarget) -> list[int]:
    """Return the device counts to try: powers of two up to the number of devices in one server."""
    product = target.sheet.product(target.product) if target.product else None
    limit = (product.per_server if product else None) or _DEFAULT_DEVICES_PER_SERVER
    return [count for count in (2, 4, 8, 16, 32, 64) if count <= limit] or [1]


def _find_obstacle(target: DeviceTarget, facts: PipelineFacts, strategy: SplitStrategy, count: int) -> str | None:
    """Return why the model cannot be split this way across `count` devices, or None if it can."""
    ranks = Ranks(count=count, tensor_types=read_tensor_parallel_devices())
    try:
        choose_parallel(target.sheet, facts, PlacementOptions(parallel=f"{strategy}:{count}"), ranks)
    except UsageError as error:
        # The message starts with the option ("parallel='tensor:2' is not available: …"); the note names it already.
        return error.message.partition(": ")[2]
    return None
