"""A decision: a value, and the reason for it in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Decision"]

T = TypeVar("T")


@dataclass(frozen=True)
class Decision(Generic[T]):
    """One line of a plan."""

    value: T
    reason: str
    """Why, in one sentence: `this device has no float64`."""

    def __str__(self) -> str:
        return _in_words(self.value)


def _in_words(value: object) -> str:
    """The value as people read it: `yes`, `dtypes, noise`, `-` for nothing."""
    if value is None or value == () or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        if len(value) and all(isinstance(item, tuple) and len(item) == 2 for item in value):
            return ", ".join(f"{_in_words(name)} → {_in_words(instead)}" for name, instead in value)
        return ", ".join(_in_words(item) for item in value)
    return str(value)
