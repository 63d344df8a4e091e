"""Which limits of a device a model meets, by what was seen of it when it was traced."""

from __future__ import annotations

from dataclasses import dataclass, field

from anyaccel.backends.claim import DtypeLimit, Limit, OperationLimit, SizeLimit
from anyaccel.backends.sheet import Sheet

__all__ = ["LimitHit", "TraceFacts", "find_limit_hits"]


@dataclass
class TraceFacts:
    """What happened inside the models of a pipeline."""

    dtypes: set[str] = field(default_factory=set)
    """The types of the tensors that were made."""
    operations: dict[str, dict[str, int]] = field(default_factory=dict)
    """By operation, of each type the most numbers that one of its tensors had."""
    most_elements: int = 0
    """The numbers of the largest tensor."""
    most_bytes: int = 0
    most_scores: int = 0
    """The scores of the largest attention call, before any slicing."""
    score_bytes: int = 0
    sequences: dict[str, int] = field(default_factory=dict)
    """By model, the longest sequence that its attention goes over."""


@dataclass(frozen=True)
class LimitHit:
    """A limit of a device that a model runs into."""

    name: str
    says: str
    effect: str
    what: str
    """What of the model meets it: `float64`, `a tensor of 5,368,709,120 numbers`."""


def find_limit_hits(
    sheet: Sheet, seen: TraceFacts, images: int, *, product: str | None = None, mode: str = ""
) -> tuple[LimitHit, ...]:
    """Every limit on a sheet that holds for certain and that this model meets at this size."""
    met = []
    for name, limit in sheet.limits(Limit).items():
        elsewhere = limit.conditional or (product, mode) in limit.not_in
        what = None if elsewhere else _meets(name, limit, seen, images)
        if what:
            met.append(LimitHit(name, limit.says, limit.effect, what))
    return tuple(met)


def _meets(name: str, limit: Limit, seen: TraceFacts, images: int) -> str | None:
    if isinstance(limit, DtypeLimit):
        dtype = name.removeprefix("dtypes.")
        return dtype if dtype in seen.dtypes else None
    if isinstance(limit, SizeLimit):
        return _passes(limit, seen)
    if isinstance(limit, OperationLimit):
        return _calls(limit, seen)
    simple = {
        "random_numbers": "the first noise",
        "batches": f"{images} images at once" if images > 1 else None,
        "data_dependent_shapes": "nonzero" if "nonzero" in seen.operations else None,
        "host_round_trip": "a number read inside a model" if "_local_scalar_dense" in seen.operations else None,
        "fused_attention": f"attention over {seen.most_scores:,} scores" if seen.most_scores else None,
    }
    return simple.get(name)


def _passes(limit: SizeLimit, seen: TraceFacts) -> str | None:
    scores = seen.score_bytes if limit.unit == "bytes" else seen.most_scores
    if scores > limit.amount:
        return f"attention over {seen.most_scores:,} scores"
    tensor = seen.most_bytes if limit.unit == "bytes" else seen.most_elements
    if limit.of == "tensor" and tensor > limit.amount:
        return f"a tensor of {seen.most_elements:,} numbers"
    return None


def _calls(limit: OperationLimit, seen: TraceFacts) -> str | None:
    for operation in limit.operations:
        found = seen.operations.get(operation) or seen.operations.get(operation.partition(".")[0]) or {}
        for dtype, elements in found.items():
            wide = limit.past_elements is None or elements > limit.past_elements
            if wide and (not limit.dtypes or dtype in limit.dtypes) and not limit.reads_ignored_input:
                return f"{operation} of {dtype}"
    return None
