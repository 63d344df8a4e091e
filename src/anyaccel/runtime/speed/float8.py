"""A linear layer that multiplies in 8 bits: rows of what comes and rows of the weight each have a scale of their own.

Nothing but plain operations on plain tensors, so that a compiler takes it as it takes any layer: what scales and rounds
the input is fused with what made it.
"""

from __future__ import annotations

import torch

from anyaccel.upstream.torch_internals import scaled_mm

__all__ = ["Float8Linear", "check_float8"]

FLOAT8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FLOAT8).max
_SMALLEST = 1e-12
"""What stands for the largest number of a row that has none but zeros."""


class Float8Linear(torch.nn.Module):
    """Stands in the place of a linear layer, and has the weight in 8 bits alone."""

    packed: torch.Tensor
    scales: torch.Tensor

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        packed, scales = pack(layer.weight.detach())
        self.register_buffer("packed", packed)
        self.register_buffer("scales", scales)
        self.bias = layer.bias
        self.dtype = layer.weight.dtype

    @property
    def weight(self) -> torch.Tensor:
        """The weight as it would be in the layer's own type, for who asks what type that is."""
        return (self.packed.to(torch.float32) * self.scales).to(self.dtype)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """`linear`, with both sides rounded to 8 bits."""
        packed, scales = pack(given.reshape(-1, self.in_features))
        return multiply(packed, scales, self.packed, self.scales, self.bias, given.dtype).reshape(
            *given.shape[:-1], self.out_features
        )

    def extra_repr(self) -> str:
        """What is printed of a layer."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def pack(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row in 8 bits, and what it is to be multiplied by."""
    scales = rows.abs().amax(1, keepdim=True).to(torch.float32).clamp_min(_SMALLEST) / _LARGEST
    return (rows.to(torch.float32) / scales).to(FLOAT8), scales


def multiply(
    rows: torch.Tensor,
    row_scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Rows times a weight's rows, both in 8 bits, in the type that is asked for."""
    return scaled_mm(
        rows,
        weight.t(),
        scale_a=row_scales,
        scale_b=weight_scales.t(),
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=True,
    )


def check_float8(device: torch.device, dtype: torch.dtype) -> None:
    """Raise what torch raises where a device has no such products, or gives others than it should."""
    layer = torch.nn.Linear(32, 32, device=device, dtype=dtype)
    rows = torch.linspace(-1, 1, 32 * 32, device=device, dtype=dtype).reshape(32, 32)
    with torch.no_grad():
        exact = layer(rows).float()
        off = (Float8Linear(layer)(rows).float() - exact).norm() / exact.norm()
    if not bool(off < 0.1):
        raise RuntimeError(f"products in 8 bits are {float(off):.0%} off here")
