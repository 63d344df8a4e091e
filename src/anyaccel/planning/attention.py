"""How large an attention call may be."""

from __future__ import annotations

import math
from dataclasses import dataclass

from anyaccel.backends.claim import SizeLimit
from anyaccel.backends.quirks import NON_CONTIGUOUS_ATTENTION
from anyaccel.backends.sheet import Sheet
from anyaccel.planning.decision import Decision
from anyaccel.planning.options import PlacementOptions

__all__ = ["AS_IT_IS", "AttentionRule", "choose_attention"]

MARGIN = 2
"""Slices hold this many times less than the limit: where the corruption starts is known only roughly."""


@dataclass(frozen=True)
class AttentionRule:
    """What is done to an attention call."""

    most_scores: int | None = None
    """Batch × heads × queries × keys past which a call is sliced; None never."""
    heads: str | int | None = None
    """How many heads at once, whatever the size: a number, `auto` for half, `max` for one."""
    contiguous: bool = False
    """Whether query, key and value are laid out anew first."""

    def slices(self, query: tuple[int, ...], keys: int) -> tuple[tuple[int, ...], tuple[int, ...], int] | None:
        """The shapes of query and key and the width of value in one slice of a call; None where it is not sliced."""
        rows, queries, width = math.prod(query[:-2]), query[-2], query[-1]
        heads = query[-3] if len(query) > 2 else 1
        at_once = {"auto": max(1, heads // 2), "max": 1, None: rows}.get(self.heads, self.heads)  # type: ignore[arg-type]
        assert isinstance(at_once, int)
        most = self.most_scores
        if at_once >= rows and (most is None or rows * queries * keys <= most):
            return None
        some = queries
        if most is not None:
            at_once = max(1, min(at_once, most // (queries * keys)))
            some = max(1, min(queries, most // (at_once * keys)))
        return (at_once, some, width), (at_once, keys, width), width

    def __str__(self) -> str:
        parts = []
        if self.heads is not None:
            parts.append(f"in slices ({self.heads} heads)" if isinstance(self.heads, int) else f"sliced: {self.heads}")
        if self.most_scores is not None:
            parts.append(f"sliced past {self.most_scores:,} scores")
        if self.contiguous:
            parts.append("contiguous")
        return ", ".join(parts) or "as it is"


AS_IT_IS = AttentionRule()


def choose_attention(sheet: Sheet, options: PlacementOptions, element_bytes: int) -> Decision[AttentionRule]:
    """Slice where the scores would pass a limit of the device, or always if asked to."""
    limits = [limit for limit in sheet.limits(SizeLimit).values() if not limit.conditional]
    amounts = [limit.amount // (element_bytes if limit.unit == "bytes" else 1) for limit in limits]
    most = min(amounts) // MARGIN if amounts else None
    rule = AttentionRule(most, options.attention_slicing, sheet.has_quirk(NON_CONTIGUOUS_ATTENTION))
    reasons = [limit.says for limit in limits]
    if options.attention_slicing is not None:
        reasons.insert(0, "slicing was asked for.")
    if rule.contiguous:
        reasons += [found.says for found in sheet.quirks if found.name == NON_CONTIGUOUS_ATTENTION]
    return Decision(rule, " ".join(reasons) or "no limit on the size of attention is known here")
