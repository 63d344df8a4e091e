"""Memory that is read before it is written, where a device lets what lay in it through."""

from __future__ import annotations

from typing import Any

import torch

from anyaccel.backends.torch_device import is_on

__all__ = ["make_beta_zero_handlers", "make_zero_empty_handlers"]

Tensor = torch.Tensor
_UNWRITTEN = (torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided)


def make_zero_empty_handlers(device: torch.device) -> dict[Any, Any]:
    """`torch.empty` on the device gives zeros."""

    def zero(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made = func(*args, **kwargs)
        return made.zero_() if is_on(made.device, device.type) else made

    return dict.fromkeys(_UNWRITTEN, zero)


def make_beta_zero_handlers() -> dict[Any, Any]:
    """`baddbmm(…, beta=0)` and its like multiply without the first argument that they should ignore."""

    def multiply(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("beta", 1) != 0:
            return func(*args, **kwargs)
        left: Any = args[1] if len(args) > 1 else kwargs.get("batch1", kwargs.get("mat1"))
        right: Any = args[2] if len(args) > 2 else kwargs.get("batch2", kwargs.get("mat2"))
        alpha = kwargs.get("alpha", 1)
        return torch.matmul(left, right) if alpha == 1 else torch.matmul(left, right) * alpha

    return {torch.baddbmm: multiply, Tensor.baddbmm: multiply, torch.addmm: multiply, Tensor.addmm: multiply}
