"""Functions that combine several model calls into one batched call and split the batched result."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from anyaccel.upstream.torch_internals import TreeSpec, read_version, tree_flatten, tree_unflatten

__all__ = ["CallArgs", "join_args", "make_call_args", "results_match", "split_result"]

# Largest relative difference of a batched result: kernels may sum in another order for another batch size.
_TOLERANCE, _HALF_TOLERANCE = 1e-4, 3e-2
# Cached results of `_are_equal`: tensor -> other tensor -> (states of both, whether they are equal).
_EQUAL_CACHE: Any = WeakIdKeyDictionary()
_LOCK = threading.Lock()
_LEAF_TYPES = (torch.Tensor, str, int, float, bool, type(None), torch.dtype, torch.device)
# Structure of a call's arguments. Without nesting: the number of positional arguments and the keyword names.
_Spec = TreeSpec | tuple[int, tuple[str, ...]]


@dataclass(frozen=True, eq=False)
class CallArgs:
    """Arguments of one model call, flattened to a tuple of tensors and other values."""

    leaves: tuple[Any, ...]
    spec: _Spec
    rows: int
    """Batch size of the call."""
    key: tuple[Any, ...]
    """Properties that two calls must share to be joined: dtypes, devices, shapes without the batch, plain values."""

    def can_join(self, other: CallArgs) -> bool:
        """Return whether this call and `other` can run in one batch.

        They can if their arguments differ only in timesteps and in tensors with a batch dimension.
        """
        if self is other:
            return True
        if self.spec != other.spec or self.key != other.key:
            return False
        # Tensors without a batch dimension (such as position ids) are passed once, so they must hold the same values.
        return all(
            _are_equal(left, right)
            for left, right in zip(self.leaves, other.leaves, strict=True)
            if isinstance(left, torch.Tensor) and not _has_rows(left, self.rows) and left.dim() > 0
        )


def _are_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors hold the same values.

    The result is cached, because `torch.equal` synchronizes with the device.
    """
    if left is right:
        return True
    state = _read_state(left), _read_state(right)
    with _LOCK:
        cached = _EQUAL_CACHE.get(left, {}).get(right)
    if cached is None or cached[0] != state:
        cached = state, bool(torch.equal(left, right))
        with _LOCK:
            _EQUAL_CACHE.setdefault(left, WeakIdKeyDictionary())[right] = cached
    return bool(cached[1])


def _read_state(tensor: torch.Tensor) -> tuple[int, int]:
    """Return a tensor's data pointer and version counter; the counter is -1 for inference tensors."""
    return tensor.data_ptr(), -1 if tensor.is_inference() else read_version(tensor)


def _flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], _Spec]:
    # Runs for every call at every step, and most calls have no nested arguments: skip pytree for those.
    values = [*args, *kwargs.values()]
    if all(isinstance(value, _LEAF_TYPES) for value in values):
        return values, (len(args), tuple(kwargs))
    return tree_flatten((args, kwargs))


def _unflatten(leaves: Sequence[Any], spec: _Spec) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(spec, tuple):
        positional, names = spec
        return tuple(leaves[:positional]), dict(zip(names, leaves[positional:], strict=True))
    args, kwargs = tree_unflatten(leaves, spec)
    return args, kwargs


def make_call_args(args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArgs | None:
    """Flatten the arguments of a model call; return None if the call cannot be batched.

    A call cannot be batched if no argument is a tensor with at least two dimensions, if an argument has
    an unsupported type, or if the model may write to an argument.
    """
    if any(_is_model_state(value) for value in (*args, *kwargs.values())):
        return None
    leaves, spec = _flatten(args, kwargs)
    first = next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 1), None)
    if first is None or not all(isinstance(leaf, _LEAF_TYPES) for leaf in leaves):
        return None
    rows = first.shape[0]
    return CallArgs(tuple(leaves), spec, rows, tuple(_make_leaf_key(leaf, rows) for leaf in leaves))


def _is_model_state(value: Any) -> bool:
    """Return whether an argument is a list that the model may write to.

    Wan's VAE passes its decoder a list of cached features, of which some are None, and a list with an index. The
    decoder changes both, but a batched call would get copies of them.
    """
    return isinstance(value, list) and not all(isinstance(element, torch.Tensor) for element in value)


def _has_rows(tensor: torch.Tensor, rows: int) -> bool:
    return tensor.dim() > 0 and tensor.shape[0] == rows


def _make_leaf_key(leaf: Any, rows: int) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return type(leaf), leaf
    if leaf.dim() == 0:
        return "scalar", leaf.dtype, leaf.device  # a timestep, which may differ between calls
    has_rows = _has_rows(leaf, rows)
    return "rows" if has_rows else "shared", leaf.shape[1:] if has_rows else leaf.shape, leaf.dtype, leaf.device


def join_args(calls: Sequence[CallArgs], rows: int | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Concatenate the arguments of several model calls into the arguments of one batched call.

    If `rows` is given, the batch is padded to `rows` rows by repeating the last row.
    """
    first = calls[0]
    if len(calls) == 1 and rows is None:
        return _unflatten(first.leaves, first.spec)
    padding = 0 if rows is None else rows - sum(call.rows for call in calls)
    leaves = [_join_leaf([call.leaves[index] for call in calls], calls, padding) for index in range(len(first.leaves))]
    return _unflatten(leaves, first.spec)


def _join_leaf(leaves: list[Any], calls: Sequence[CallArgs], padding: int) -> Any:
    if not isinstance(leaves[0], torch.Tensor):
        return leaves[0]
    if leaves[0].dim() == 0:
        # Denoisers accept one timestep per row, so calls at different steps can share a batch.
        rows = [leaf.expand(call.rows) for leaf, call in zip(leaves, calls, strict=True)]
    elif _has_rows(leaves[0], calls[0].rows):
        rows = list(leaves)
    else:
        return leaves[0]
    if padding:
        rows.append(rows[-1][-1:].expand(padding, *rows[-1].shape[1:]))
    return torch.cat(rows)


def split_result(result: Any, rows: Sequence[int]) -> list[Any]:
    """Split the result of a batched call into one result per original call.

    `rows` contains the batch size of each original call.
    """
    if len(rows) == 1 or (len(rows) == 2 and rows[1] == 0):  # one call, unpadded
        return [result]
    leaves, spec = tree_flatten(result)
    total = sum(rows)
    chunks = [
        torch.split(leaf, list(rows)) if isinstance(leaf, torch.Tensor) and _has_rows(leaf, total) else None
        for leaf in leaves
    ]
    return [
        tree_unflatten(
            [leaf if chunk is None else chunk[call] for leaf, chunk in zip(leaves, chunks, strict=True)], spec
        )
        for call in range(len(rows))
    ]


def results_match(result: Any, expected: Any) -> bool:
    """Return whether the floating-point tensors in two outputs match within a dtype-dependent tolerance."""
    pairs = zip(tree_flatten(result)[0], tree_flatten(expected)[0], strict=True)
    for left, right in pairs:
        if not isinstance(left, torch.Tensor) or not left.is_floating_point():
            continue
        if left.shape != right.shape:
            return False
        tolerance = _TOLERANCE if left.dtype in (torch.float32, torch.float64) else _HALF_TOLERANCE
        scale = right.float().abs().max().clamp_min(1e-6)
        # `not ... <=` instead of `>`: a NaN in either result is a mismatch.
        if not bool(((left.float() - right.float()).abs().max() / scale) <= tolerance):
            return False
    return True
