"""A tensor's state: whether it is what it was when something was worked out of it."""

from __future__ import annotations

from typing import TypeAlias

import torch

__all__ = ["TensorState", "read_state", "take_sample"]

TensorState: TypeAlias = tuple[int, int]


def read_state(tensor: torch.Tensor) -> TensorState:
    """Where it lies, and how often it was written to, which tensors of inference mode do not count."""
    return tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version


def take_sample(weight: torch.Tensor) -> torch.Tensor:
    """Some of a weight's numbers: what writes past torch's count of writes changes them too."""
    return weight.detach()[:: max(1, weight.shape[0] // 8), :: max(1, weight.shape[1] // 8)].clone()
