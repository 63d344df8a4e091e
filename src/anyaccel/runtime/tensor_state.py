"""A tensor's state: whether it is what it was when something was worked out of it."""

from __future__ import annotations

from typing import TypeAlias

import torch

__all__ = ["TensorState", "read_state"]

TensorState: TypeAlias = tuple[int, int]


def read_state(tensor: torch.Tensor) -> TensorState:
    """Where it lies, and how often it was written to, which tensors of inference mode do not count."""
    return tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version
