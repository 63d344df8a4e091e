"""What several devices would buy: memory a rank where weights are split, sequence a rank where that is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from anyaccel.errors import UsageError
from anyaccel.explanation.device_target import DeviceTarget
from anyaccel.planning.decision import Decision
from anyaccel.planning.facts import PipelineFacts
from anyaccel.planning.footprint import Footprint, Measure, MemorySavings, ModelSize
from anyaccel.planning.memory import predict
from anyaccel.planning.options import FLOATING_BYTES, PlacementOptions
from anyaccel.planning.parallel import ALONE, Ranks, Split, SplitStrategy, choose_parallel, weigh_rank
from anyaccel.units import readable
from anyaccel.upstream.diffusers_internals import read_tensor_parallel_devices

__all__ = ["choose_split", "describe_gain", "split_memory"]

_MOST = 8
_LONG = 16_384
"""Tokens from which on attention takes most of a step: a picture of 1024 × 1024 has 4,096, a short video twice this."""
_FREE_SHARE = 0.8


def choose_split(
    target: DeviceTarget, facts: PipelineFacts, options: PlacementOptions, dtype: str
) -> Decision[Split | None]:
    """The split that was asked about; `auto` takes as many devices of a server as the model can be shared out to."""
    if options.parallel is None:
        return ALONE
    weights = sum(one.parameters for one in facts.components) * FLOATING_BYTES[dtype]
    fits = weights <= target.capacity_bytes * _FREE_SHARE
    known = Ranks(count=None, tensor_types=read_tensor_parallel_devices(), fits_alone=fits)
    if options.parallel != "auto":
        return choose_parallel(target.sheet, facts, options, known)
    found = [
        choose_parallel(target.sheet, facts, options, replace(known, count=count))
        for count in reversed(_counts(target))
    ]
    split = [one for one in found if one.value is not None and one.value.strategy != "cfg"]
    return split[0] if split else found[-1]


def split_memory(measure: Measure, facts: PipelineFacts, split: Split | None) -> Measure:
    """What one rank holds: its share of the weights; what models hold besides is counted as on one device."""
    if split is None or split.strategy != "tensor":
        return measure
    shares = {one.name: weigh_rank(one, split) / max(1, one.parameters) for one in facts.components}

    def share(model: ModelSize) -> ModelSize:
        return replace(model, weights_bytes=int(model.weights_bytes * shares.get(model.name, 1.0)))

    def measure_rank(way: MemorySavings, images: int) -> Footprint:
        whole = measure(way, images)
        return replace(whole, models=tuple(share(model) for model in whole.models))

    return measure_rank


def describe_gain(
    target: DeviceTarget,
    facts: PipelineFacts,
    measure: Measure,
    sequences: Mapping[str, int],
    *,
    resident: bool,
    asked: bool,
) -> tuple[str, ...]:
    """What `parallel=` would buy, where weights do not stay on one device or a sequence is long, or somebody asks."""
    models = [one for one in facts.components if one.denoises]
    tokens = max((sequences.get(model.name, 0) for model in models), default=0)
    if not models or (resident and tokens < _LONG and not asked) or max(_counts(target)) < 2:
        return ()
    said = [] if resident and not asked else [_tell_tensor(target, facts, measure)]
    said.append(_tell_context(target, facts, measure, tokens))
    return tuple(said)


def _tell_tensor(target: DeviceTarget, facts: PipelineFacts, measure: Measure) -> str:
    counts = [count for count in _counts(target) if _refusal(target, facts, "tensor", count) is None]
    if not counts:
        return f"parallel='tensor' is not to be had here: {_refusal(target, facts, 'tensor', 2)}"
    whole = measure(MemorySavings(), 1)
    for count in counts:
        rank = split_memory(measure, facts, Split("tensor", count))(MemorySavings(), 1)
        stays = max(predict(rank, "resident").values()) <= target.capacity_bytes
        if stays or count == counts[-1]:
            break
    weights = f"of {readable(whole.weights_bytes)} of weights a rank holds {readable(rank.weights_bytes)}"
    return f"parallel='tensor:{count}': {weights}, and {'all of it stays' if stays else 'not even that stays'} there"


def _tell_context(target: DeviceTarget, facts: PipelineFacts, measure: Measure, tokens: int) -> str:
    counts = [count for count in _counts(target) if _refusal(target, facts, "context", count) is None]
    if not counts:
        return f"parallel='context' is not to be had here: {_refusal(target, facts, 'context', 2)}"
    most, weights = counts[-1], readable(measure(MemorySavings(), 1).weights_bytes)
    share = f"of {tokens:,} tokens a rank takes {-(-tokens // most):,}" if tokens else "the sequence is shared out"
    return f"parallel='context:{most}': {share}, for time and for what a step holds; each has all {weights} of weights"


def _counts(target: DeviceTarget) -> list[int]:
    """How many devices may share the work: 2, 4, and so on to what a server has."""
    product = target.sheet.product(target.product) if target.product else None
    most = (product.per_server if product else None) or _MOST
    return [count for count in (2, 4, 8, 16, 32, 64) if count <= most] or [1]


def _refusal(target: DeviceTarget, facts: PipelineFacts, way: SplitStrategy, count: int) -> str | None:
    ranks = Ranks(count=count, tensor_types=read_tensor_parallel_devices())
    try:
        choose_parallel(target.sheet, facts, PlacementOptions(parallel=f"{way}:{count}"), ranks)
    except UsageError as error:
        return error.message.partition(": ")[2]
    return None
