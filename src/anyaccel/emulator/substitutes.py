"""Substitutes for device kernels that the CPU, on which virtual devices compute, lacks."""

from __future__ import annotations

from typing import Any

import torch

from anyaccel.emulator import recurrent_cells

__all__ = ["SUBSTITUTES"]


def count_values(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute `torch.histc`, also for integers, as on CUDA."""
    # transformers counts the tokens of each expert this way, with integers on all devices but CPU and MPS.
    if tensor.is_floating_point():
        return torch.histc(tensor, *args, **kwargs)
    return torch.histc(tensor.to(torch.float64), *args, **kwargs).to(tensor.dtype)


SUBSTITUTES: dict[str, Any] = recurrent_cells.SUBSTITUTES | {"histc": count_values}
