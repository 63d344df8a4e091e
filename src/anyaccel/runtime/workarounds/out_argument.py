"""The `out=` argument of torch functions that a handler replaces by other functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["supporting_out", "write_out"]


def supporting_out(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Return a handler that calls `handler` without `out=` and writes the result into that tensor."""

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = kwargs.get("out")
        if out is None:
            return handler(func, args, kwargs)
        result = handler(func, args, {name: value for name, value in kwargs.items() if name != "out"})
        return write_out(result, out)

    return run


def write_out(result: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write a result into the tensor that was passed as `out=`, which gets the shape of the result, as in torch."""
    if out.shape != result.shape:
        out.resize_(result.shape)
    return out.copy_(result)
