"""Decisions in a plan, each with a value and a reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from anyaccel.backends.claim import Claim

__all__ = ["Decision", "cite"]

T = TypeVar("T")


@dataclass(frozen=True)
class Decision(Generic[T]):
    """One decision in a plan: the chosen value and the reason for it."""

    value: T
    reason: str
    """Why, in one sentence: `the device has no float64`."""

    def __str__(self) -> str:
        return _format(self.value)


def cite(claim: Claim) -> str:
    """Format a claim with its source: `Row-wise scaled products are faster (https://…)`."""
    return f"{claim.says.removesuffix('.')} ({claim.source})"


def _format(value: object) -> str:
    """Format a decision's value, for example as `yes` or `dtypes, noise`; an empty value becomes `-`."""
    if value is None or value == () or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        if len(value) and all(isinstance(item, tuple) and len(item) == 2 for item in value):
            return ", ".join(f"{_format(name)} → {_format(replacement)}" for name, replacement in value)
        return ", ".join(_format(item) for item in value)
    return str(value)
