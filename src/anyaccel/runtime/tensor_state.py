"""A tensor's state: whether it is what it was when something was worked out of it."""

from __future__ import annotations

import functools
from typing import TypeAlias

import torch

__all__ = ["TensorState", "fingerprint", "read_state"]

TensorState: TypeAlias = tuple[int, int]


def read_state(tensor: torch.Tensor) -> TensorState:
    """Where it lies, and how often it was written to, which tensors of inference mode do not count."""
    return tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version


def fingerprint(weight: torch.Tensor) -> torch.Tensor:
    """Sums of a weight's rows as they lie: what writes past torch's count of writes changes them too.

    Each number counts by its place in the row, so that a row that is turned around is another; in half precision, of
    which the host makes no products, all count alike. It takes 2 ms for 15 million numbers on two cores.
    """
    numbers = weight.detach()
    if numbers.dim() < 2:
        return numbers.clone()
    rows = numbers.permute(sorted(range(numbers.dim()), key=numbers.stride, reverse=True)).flatten(1)
    if rows.dtype in (torch.float32, torch.float64):
        return rows @ _find_shares(rows.shape[1]).to(rows.dtype)
    return rows.sum(1, dtype=torch.float32 if rows.is_floating_point() else None)


@functools.lru_cache(64)
def _find_shares(count: int) -> torch.Tensor:
    """Numbers from a half to one and a half, no two the same and in no order: by the golden ratio."""
    with torch.inference_mode(False):  # they are used outside of it too
        return ((torch.arange(count, dtype=torch.float64) * 0.6180339887498949) % 1 + 0.5).float()
