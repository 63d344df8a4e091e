"""Workarounds for uninitialized memory that affects results (`torch.empty`, `baddbmm(beta=0)`)."""

from __future__ import annotations

from typing import Any

import torch

from anyaccel.backends.device_type_checks import is_on

__all__ = ["make_beta_zero_handlers", "make_zero_empty_handlers"]

Tensor = torch.Tensor
_EMPTY_FACTORIES = (torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided)


def make_zero_empty_handlers(device: torch.device) -> dict[Any, Any]:
    """Return handlers that zero-fill the results of `torch.empty` and similar functions on the device."""

    # On MPS new memory can contain NaN. diffusers' sliced attention passes `torch.empty` to `baddbmm`, and one NaN
    # turns the image black: https://github.com/huggingface/diffusers/issues/14438 (torch 2.13).
    def zero(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = func(*args, **kwargs)
        return tensor.zero_() if is_on(tensor.device, device.type) else tensor

    return dict.fromkeys(_EMPTY_FACTORIES, zero)


def make_beta_zero_handlers() -> dict[Any, Any]:
    """Return handlers that compute `baddbmm(…, beta=0)` and `addmm(…, beta=0)` without the ignored input."""

    # MPS multiplies the input by 0 instead of ignoring it, and 0 * NaN is NaN:
    # https://github.com/pytorch/pytorch/issues/187521 (seen in torch 2.11 to 2.13, fixed on its main branch).
    def multiply(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("beta", 1) != 0:
            return func(*args, **kwargs)
        left: Any = args[1] if len(args) > 1 else kwargs.get("batch1", kwargs.get("mat1"))
        right: Any = args[2] if len(args) > 2 else kwargs.get("batch2", kwargs.get("mat2"))
        alpha = kwargs.get("alpha", 1)
        return torch.matmul(left, right) if alpha == 1 else torch.matmul(left, right) * alpha

    return {torch.baddbmm: multiply, Tensor.baddbmm: multiply, torch.addmm: multiply, Tensor.addmm: multiply}
