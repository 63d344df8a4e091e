"""One call of a recording, and where its tensors lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

__all__ = ["Call", "View", "find_storages", "flatten", "have_same_numbers", "lie_in"]


class View(NamedTuple):
    """Where a tensor lies."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass
class Call:
    """One call that computes, with a `View` in the place of every tensor."""

    function: Any
    args: Sequence[Any]
    kwargs: dict[str, Any] = field(default_factory=dict)
    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    made: tuple[View, ...] = ()
    """What it makes memory for itself; nothing where it writes to what is there."""
    several: bool = False
    """Whether it gives a tuple."""


def flatten(value: Any) -> Iterator[Any]:
    """What is inside lists, tuples and dictionaries."""
    if type(value) in (list, tuple):
        for one in value:
            yield from flatten(one)
    elif type(value) is dict:
        yield from flatten(list(value.values()))
    else:
        yield value


def find_storages(value: Any) -> frozenset[int]:
    """The storages of all tensors in something that was described."""
    return frozenset(leaf.storage for leaf in flatten(value) if isinstance(leaf, View))


def lie_in(storage: torch.UntypedStorage, view: View) -> torch.Tensor:
    """The tensor that lies there."""
    return torch.empty(0, dtype=view.dtype).set_(storage, view.offset, view.size, view.stride)


def have_same_numbers(one: Any, other: Any) -> bool:
    """Whether two tensors hold the same to the last bit, and what is no tensor is the same object."""
    if not isinstance(one, torch.Tensor):
        return one is other
    return bool(((one == other) | ((one != one) & (other != other))).all())
