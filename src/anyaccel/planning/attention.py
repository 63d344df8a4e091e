"""Attention slicing: which attention calls are split into slices, and the shapes of the slices."""

from __future__ import annotations

import math
from dataclasses import dataclass

from anyaccel.backends.claim import SizeLimit
from anyaccel.backends.quirks import NON_CONTIGUOUS_ATTENTION
from anyaccel.backends.sheet import Sheet
from anyaccel.planning.decision import Decision
from anyaccel.planning.options import PlacementOptions

__all__ = ["UNCHANGED_ATTENTION", "AttentionRule", "choose_attention"]

# Safety factor: bug reports give only a rough size at which corruption starts.
MARGIN = 2


@dataclass(frozen=True)
class AttentionRule:
    """A rule that defines when to slice attention calls and whether to make their inputs contiguous."""

    max_scores: int | None = None
    """The largest number of scores (batch × heads × queries × keys) that runs unsliced; None for no limit."""
    heads: str | int | None = None
    """Heads per slice regardless of size: an integer, `auto` for half of them, `max` for one head."""
    contiguous: bool = False
    """Whether to call `.contiguous()` on query, key and value first."""

    def slices(self, query: tuple[int, ...], keys: int) -> tuple[tuple[int, ...], tuple[int, ...], int] | None:
        """Return the query shape, key shape and value width of one slice, or None if the call is not sliced.

        `query` is the shape of the query tensor, and `keys` is the number of keys.
        """
        rows, queries, width = math.prod(query[:-2]), query[-2], query[-1]
        heads = query[-3] if len(query) > 2 else 1
        # Same arithmetic as attend_in_slices() in runtime/workarounds, which flattens batch and heads into rows.
        slice_rows = {"auto": max(1, heads // 2), "max": 1, None: rows}.get(self.heads, self.heads)  # type: ignore[arg-type]
        assert isinstance(slice_rows, int)
        most = self.max_scores
        if slice_rows >= rows and (most is None or rows * queries * keys <= most):
            return None
        slice_queries = queries
        if most is not None:
            # Queries are split only if a single row is still too large.
            slice_rows = max(1, min(slice_rows, most // (queries * keys)))
            slice_queries = max(1, min(queries, most // (slice_rows * keys)))
        return (slice_rows, slice_queries, width), (slice_rows, keys, width), width

    def __str__(self) -> str:
        changes = []
        if self.heads is not None:
            changes.append(_describe_heads(self.heads))
        if self.max_scores is not None:
            changes.append(f"sliced above {self.max_scores:,} scores")
        if self.contiguous:
            changes.append("contiguous")
        return ", ".join(changes) or "unchanged"


def _describe_heads(heads: str | int) -> str:
    if isinstance(heads, int) and heads > 1:
        return f"sliced, {heads} heads at a time"
    return "sliced, half of the heads at a time" if heads == "auto" else "sliced, one head at a time"


UNCHANGED_ATTENTION = AttentionRule()


def choose_attention(sheet: Sheet, options: PlacementOptions, element_bytes: int) -> Decision[AttentionRule]:
    """Return the rule for slicing attention: calls above a device size limit, or all calls if requested.

    `element_bytes` is the size of one tensor element, for limits in bytes.
    """
    # A limit with an open condition may not apply to this device, and slicing costs time.
    limits = [limit for limit in sheet.limits(SizeLimit).values() if not limit.conditional]
    amounts = [limit.amount // (element_bytes if limit.unit == "bytes" else 1) for limit in limits]
    most = min(amounts) // MARGIN if amounts else None
    rule = AttentionRule(most, options.attention_slicing, sheet.has_quirk(NON_CONTIGUOUS_ATTENTION))
    reasons = [limit.says for limit in limits]
    if options.attention_slicing is not None:
        reasons.insert(0, f"attention_slicing={options.attention_slicing!r} was requested.")
    if rule.contiguous:
        reasons += [quirk.says for quirk in sheet.quirks if quirk.name == NON_CONTIGUOUS_ATTENTION]
    return Decision(rule, " ".join(reasons) or "no limit on attention size is known for this device")
