"""The tensors inside the weights of quanto."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["read_quanto_tensors"]


def read_quanto_tensors(weight: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int] | None:
    """Return the codes, scales, offsets and bits of a weight; None if it is not quantized (tensor/weights/*.py)."""
    if not hasattr(weight, "_scale"):
        return None
    data, scales, shift = weight._data, weight._scale, getattr(weight, "_shift", None)
    if shift is None:
        return data, scales, None, 8
    shift = shift.detach().to(torch.float32).reshape(-1)
    # A shift is a zero point if it is an integer (tensor/qbits.py).
    if not weight._shift.dtype.is_floating_point:
        shift = shift * scales.detach().to(torch.float32).reshape(-1)
    return data.unpack() if hasattr(data, "unpack") else data, scales, -shift, weight._qtype.bits
