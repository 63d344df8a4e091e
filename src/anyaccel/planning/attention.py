"""How large an attention call may be."""

from __future__ import annotations

from dataclasses import dataclass

from anyaccel.backends.claim import SizeLimit
from anyaccel.backends.sheet import Sheet
from anyaccel.planning.decision import Decision
from anyaccel.planning.wishes import Wishes

__all__ = ["AttentionRule", "choose_attention"]

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

    def __str__(self) -> str:
        parts = []
        if self.heads is not None:
            parts.append(f"in slices ({self.heads} heads)" if isinstance(self.heads, int) else f"sliced: {self.heads}")
        if self.most_scores is not None:
            parts.append(f"sliced past {self.most_scores:,} scores")
        if self.contiguous:
            parts.append("contiguous")
        return ", ".join(parts) or "as it is"


def choose_attention(sheet: Sheet, wishes: Wishes, element_bytes: int) -> Decision[AttentionRule]:
    """Slice where the scores would pass a limit of the device, or always if asked to."""
    limits = [limit for limit in sheet.limits(SizeLimit).values() if not limit.conditional]
    amounts = [limit.amount // (element_bytes if limit.unit == "bytes" else 1) for limit in limits]
    most = min(amounts) // MARGIN if amounts else None
    quirk = "non_contiguous_attention"
    rule = AttentionRule(most, wishes.attention_slicing, sheet.has_quirk(quirk))
    reasons = [limit.says for limit in limits]
    if wishes.attention_slicing is not None:
        reasons.insert(0, "slicing was asked for.")
    if rule.contiguous:
        reasons += [found.says for found in sheet.quirks if found.name == quirk]
    return Decision(rule, " ".join(reasons) or "no limit on the size of attention is known here")
