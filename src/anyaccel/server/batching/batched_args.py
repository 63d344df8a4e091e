"""Joining: the arguments of several calls of one model as those of one call, and its result as theirs."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from anyaccel.upstream.torch_internals import TreeSpec, read_version, tree_flatten, tree_unflatten

__all__ = ["CallArgs", "are_alike", "join", "make_call_args", "split"]

_SAME, _SAME_IN_HALF = 1e-4, 3e-2
_COMPARED: Any = WeakIdKeyDictionary()
"""For each tensor those that it was compared with, their states at that time, and the answer."""
_LOCK = threading.Lock()
_LEAVES = (torch.Tensor, str, int, float, bool, type(None), torch.dtype, torch.device)


_Spec = TreeSpec | tuple[int, tuple[str, ...]]
"""How arguments are put together again; where none is nested, how many have no name, and the names of the others."""


@dataclass(frozen=True, eq=False)
class CallArgs:
    """One call's arguments, taken apart."""

    leaves: tuple[Any, ...]
    spec: _Spec
    rows: int
    """How many rows of a batch it is."""
    key: tuple[Any, ...]
    """What two calls must have in common to be joined."""

    def joins(self, other: CallArgs) -> bool:
        """Whether both can be one call: alike in all but rows and times, and what they share is the same."""
        if self is other:
            return True
        if self.spec != other.spec or self.key != other.key:
            return False
        return all(
            _are_equal(mine, theirs)
            for mine, theirs in zip(self.leaves, other.leaves, strict=True)
            if isinstance(mine, torch.Tensor) and not _has_rows(mine, self.rows) and mine.dim() > 0
        )


def _are_equal(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether two tensors hold the same; found out once, since the host waits for the device at that."""
    if mine is theirs:
        return True
    state = _read_state(mine), _read_state(theirs)
    with _LOCK:
        kept = _COMPARED.get(mine, {}).get(theirs)
    if kept is None or kept[0] != state:
        kept = state, bool(torch.equal(mine, theirs))
        with _LOCK:
            _COMPARED.setdefault(mine, WeakIdKeyDictionary())[theirs] = kept
    return bool(kept[1])


def _read_state(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address and the write count of a tensor; inference tensors count no writes."""
    return tensor.data_ptr(), -1 if tensor.is_inference() else read_version(tensor)


def _take_apart(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], _Spec]:
    """The leaves of a call's arguments; every call is taken apart at every step, and few have any that are nested."""
    given = [*args, *kwargs.values()]
    if all(isinstance(one, _LEAVES) for one in given):
        return given, (len(args), tuple(kwargs))
    return tree_flatten((args, kwargs))


def _put_together(leaves: Sequence[Any], spec: _Spec) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(spec, tuple):
        number, names = spec
        return tuple(leaves[:number]), dict(zip(names, leaves[number:], strict=True))
    args, kwargs = tree_unflatten(leaves, spec)
    return args, kwargs


def make_call_args(args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArgs | None:
    """A call's ticket; None where an argument may hold what cannot be joined."""
    leaves, spec = _take_apart(args, kwargs)
    first = next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 1), None)
    if first is None or not all(isinstance(leaf, _LEAVES) for leaf in leaves):
        return None
    rows = first.shape[0]
    return CallArgs(tuple(leaves), spec, rows, tuple(_describe(leaf, rows) for leaf in leaves))


def _has_rows(tensor: torch.Tensor, rows: int) -> bool:
    return tensor.dim() > 0 and tensor.shape[0] == rows


def _describe(leaf: Any, rows: int) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return type(leaf), leaf
    if leaf.dim() == 0:
        return "a number", leaf.dtype, leaf.device  # a time, which each row may have its own of
    by_rows = _has_rows(leaf, rows)
    return "rows" if by_rows else "shared", leaf.shape[1:] if by_rows else leaf.shape, leaf.dtype, leaf.device


def join(tickets: Sequence[CallArgs], rows: int | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of one call in the place of several; with `rows`, filled up to so many by the last row."""
    first = tickets[0]
    if len(tickets) == 1 and rows is None:
        return _put_together(first.leaves, first.spec)
    missing = 0 if rows is None else rows - sum(ticket.rows for ticket in tickets)
    leaves = [
        _join_leaf([ticket.leaves[place] for ticket in tickets], tickets, missing) for place in range(len(first.leaves))
    ]
    return _put_together(leaves, first.spec)


def _join_leaf(found: list[Any], tickets: Sequence[CallArgs], missing: int) -> Any:
    if not isinstance(found[0], torch.Tensor):
        return found[0]
    if found[0].dim() == 0:
        rows = [leaf.expand(ticket.rows) for leaf, ticket in zip(found, tickets, strict=True)]
    elif _has_rows(found[0], tickets[0].rows):
        rows = list(found)
    else:
        return found[0]
    if missing:
        rows.append(rows[-1][-1:].expand(missing, *rows[-1].shape[1:]))
    return torch.cat(rows)


def split(result: Any, rows: Sequence[int]) -> list[Any]:
    """Each call's rows of a result."""
    if len(rows) == 1 or (len(rows) == 2 and rows[1] == 0):
        return [result]
    leaves, spec = tree_flatten(result)
    total = sum(rows)
    parts = [
        torch.split(leaf, list(rows)) if isinstance(leaf, torch.Tensor) and _has_rows(leaf, total) else None
        for leaf in leaves
    ]
    return [
        tree_unflatten([leaf if part is None else part[number] for leaf, part in zip(leaves, parts, strict=True)], spec)
        for number in range(len(rows))
    ]


def are_alike(one: Any, other: Any) -> bool:
    """Whether two results are the same to rounding in their type."""
    pairs = zip(tree_flatten(one)[0], tree_flatten(other)[0], strict=True)
    for left, right in pairs:
        if not isinstance(left, torch.Tensor) or not left.is_floating_point():
            continue
        if left.shape != right.shape:
            return False
        allowed = _SAME if left.dtype in (torch.float32, torch.float64) else _SAME_IN_HALF
        scale = right.float().abs().max().clamp_min(1e-6)
        if not bool(((left.float() - right.float()).abs().max() / scale) <= allowed):
            return False
    return True
