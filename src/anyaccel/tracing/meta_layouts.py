"""Layouts of the results of common operations, found without torch's meta kernels.

With torch 2.13, the meta kernels of these operations are written in Python and take about a millisecond.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Layout", "find_layout"]

Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""Shape, strides and dtype."""


def find_layout(func: Any, args: Any, kwargs: Any) -> Layout | None:
    """Return the layout of an operation's result for contiguous arguments, or None if only its kernel knows it."""
    find = _FINDERS.get(func)
    return None if find is None else find(*args, **kwargs)


def _find_binary(left: Any, right: Any, **options: Any) -> Layout | None:
    tensors = [value for value in (left, right) if isinstance(value, torch.Tensor)]
    full = max(tensors, key=lambda tensor: (tensor.numel(), tensor.dim()))
    if not all(tensor.is_contiguous() and _expands_to(tensor.shape, full.shape) for tensor in tensors):
        return None
    dtype = torch.result_type(left, right)
    return (full.shape, full.stride(), dtype) if dtype.is_floating_point else None


def _expands_to(shape: torch.Size, full: torch.Size) -> bool:
    sides = zip(reversed(shape), reversed(full), strict=False)
    return len(shape) <= len(full) and all(side in (1, whole) for side, whole in sides)


def _find_unary(tensor: torch.Tensor, *bounds: Any, **options: Any) -> Layout | None:
    plain = tensor.is_floating_point() and tensor.is_contiguous()
    return (tensor.shape, tensor.stride(), tensor.dtype) if plain else None


def _find_cat(tensors: list[torch.Tensor], dim: int = 0) -> Layout | None:
    first = tensors[0]
    if not all(tensor.is_contiguous() and tensor.dtype == first.dtype for tensor in tensors):
        return None
    shapes = [_replace_side(tensor.shape, dim, 0) for tensor in tensors]
    if shapes[0] is None or shapes != shapes[:1] * len(shapes):
        return None
    shapes[0][dim] = sum(tensor.shape[dim] for tensor in tensors)
    return _make_contiguous(shapes[0], first.dtype)


def _find_norm(
    tensor: torch.Tensor, order: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Layout | None:
    plain = keepdim and dim is not None and len(dim) == 1 and tensor.is_contiguous() and tensor.is_floating_point()
    shape = _replace_side(tensor.shape, dim[0], 1) if plain else None
    return None if shape is None else _make_contiguous(shape, dtype or tensor.dtype)


def _replace_side(shape: torch.Size, dim: int, side: int) -> list[int] | None:
    """Return a shape with another size in one dimension, or None if it has no such dimension."""
    if not -len(shape) <= dim < len(shape):
        return None
    sides = list(shape)
    sides[dim] = side
    return sides


def _make_contiguous(shape: list[int], dtype: torch.dtype) -> Layout:
    strides, step = [], 1
    for side in reversed(shape):
        strides.append(step)
        step *= max(side, 1)
    return torch.Size(shape), tuple(reversed(strides)), dtype


_ATEN = torch.ops.aten
_FINDERS: dict[Any, Callable[..., Layout | None]] = {
    _ATEN.add.Tensor: _find_binary,
    _ATEN.sub.Tensor: _find_binary,
    _ATEN.mul.Tensor: _find_binary,
    _ATEN.div.Tensor: _find_binary,
    _ATEN.clamp.default: _find_unary,
    _ATEN.clamp_min.default: _find_unary,
    _ATEN.gelu.default: _find_unary,
    _ATEN.silu.default: _find_unary,
    _ATEN.cat.default: _find_cat,
    _ATEN.linalg_vector_norm.default: _find_norm,
}
