"""Detection of known device limits that a traced model hits."""

from __future__ import annotations

from dataclasses import dataclass, field

from anyaccel.backends.claim import DtypeLimit, Limit, OperationLimit, SizeLimit
from anyaccel.backends.sheet import Sheet

__all__ = ["LimitHit", "TraceFacts", "find_limit_hits"]


@dataclass
class TraceFacts:
    """Dtypes, operations and largest tensor sizes that were recorded while tracing a pipeline's models."""

    dtypes: set[str] = field(default_factory=set)
    """The dtypes of all tensors that were created."""
    operations: dict[str, dict[str, int]] = field(default_factory=dict)
    """For each operation and dtype, the number of elements of its largest tensor."""
    most_elements: int = 0
    """The number of elements of the largest tensor."""
    most_bytes: int = 0
    max_scores: int = 0
    """The number of scores of the largest attention call, before slicing."""
    score_bytes: int = 0
    sequences: dict[str, int] = field(default_factory=dict)
    """The longest attention sequence of each model."""


@dataclass(frozen=True)
class LimitHit:
    """A known device limit that a model hits, and what triggers it."""

    name: str
    says: str
    effect: str
    what: str
    """What triggers it: `float64`, `a tensor of 5,368,709,120 elements`."""


def find_limit_hits(
    sheet: Sheet, trace: TraceFacts, images: int, *, product: str | None = None, mode: str = ""
) -> tuple[LimitHit, ...]:
    """Return the known device limits that the traced models hit.

    Limits that apply only under certain conditions, or not to this product and execution mode, are
    omitted.
    """
    hits = []
    for name, limit in sheet.limits(Limit).items():
        # A limit with an open condition is not reported: it may not apply to this device.
        applies = not limit.conditional and (product, mode) not in limit.not_in
        trigger = _find_trigger(name, limit, trace, images) if applies else None
        if trigger:
            hits.append(LimitHit(name, limit.says, limit.effect, trigger))
    return tuple(hits)


def _find_trigger(name: str, limit: Limit, trace: TraceFacts, images: int) -> str | None:
    if isinstance(limit, DtypeLimit):
        dtype = name.removeprefix("dtypes.")
        return dtype if dtype in trace.dtypes else None
    if isinstance(limit, SizeLimit):
        return _find_large_tensor(limit, trace)
    if isinstance(limit, OperationLimit):
        return _find_operation(limit, trace)
    triggers = {
        "random_numbers": "the initial noise",
        "batches": f"{images} images in one call" if images > 1 else None,
        "data_dependent_shapes": "nonzero" if "nonzero" in trace.operations else None,
        "host_round_trip": "a value read back inside a model" if "_local_scalar_dense" in trace.operations else None,
        "fused_attention": f"attention over {trace.max_scores:,} scores" if trace.max_scores else None,
    }
    return triggers.get(name)


def _find_large_tensor(limit: SizeLimit, trace: TraceFacts) -> str | None:
    # Attention counts for limits of any tensor too: unfused kernels materialize the scores as one tensor.
    scores = trace.score_bytes if limit.unit == "bytes" else trace.max_scores
    if scores > limit.amount:
        return f"attention over {trace.max_scores:,} scores"
    tensor = trace.most_bytes if limit.unit == "bytes" else trace.most_elements
    if limit.of == "tensor" and tensor > limit.amount:
        return f"a tensor of {trace.most_elements:,} elements"
    return None


def _find_operation(limit: OperationLimit, trace: TraceFacts) -> str | None:
    for operation in limit.operations:
        # Traces record overload packets: `repeat_interleave`, not `repeat_interleave.Tensor`.
        dtypes = trace.operations.get(operation) or trace.operations.get(operation.partition(".")[0]) or {}
        for dtype, elements in dtypes.items():
            large = limit.past_elements is None or elements > limit.past_elements
            if large and (not limit.dtypes or dtype in limit.dtypes) and not limit.reads_ignored_input:
                return f"{operation} in {dtype}"
    return None
