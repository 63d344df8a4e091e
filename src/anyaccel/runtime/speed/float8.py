"""A linear layer that multiplies in float8, with one scale per row of the input and of the weight.

The layer uses only plain tensor operations. A compiler can therefore fuse the quantization of the
input with the preceding operation, which is not possible for a tensor subclass.
"""

# Why not torchao: with its tensor subclass a compiled FLUX.1 had not finished the first image after 170 s. This layer
# took 132 s (torchao 0.18, torch 2.11, one H200; docs/decisions/0008).

from __future__ import annotations

import torch

from anyaccel.backends.out_of_memory import is_out_of_memory
from anyaccel.errors import first_line
from anyaccel.upstream.torch_internals import scaled_mm

__all__ = ["Float8Linear", "Float8NotSupportedError", "check_float8"]

FLOAT8 = torch.float8_e4m3fn
_MAX_FLOAT8 = torch.finfo(FLOAT8).max
# Lower bound of a row's maximum, to avoid a division by zero for rows of zeros.
_MIN_ROW_MAX = 1e-12


class Float8NotSupportedError(RuntimeError):
    """A device does not support float8 matrix multiplication, or computes it inaccurately."""


class Float8Linear(torch.nn.Module):
    """A replacement for `torch.nn.Linear` that stores its weight only in float8."""

    packed: torch.Tensor
    scales: torch.Tensor

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        packed, scales = quantize_rows(layer.weight.detach())
        self.register_buffer("packed", packed)
        self.register_buffer("scales", scales)
        self.bias = layer.bias
        self.dtype = layer.weight.dtype
        self.train(layer.training)

    @property
    def weight(self) -> torch.Tensor:
        """The dequantized weight, for models that read the dtype or device of `weight`."""
        return (self.packed.to(torch.float32) * self.scales).to(self.dtype)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Apply the linear layer, multiplying the quantized input by the float8 weight."""
        packed, scales = quantize_rows(inputs.reshape(-1, self.in_features))
        return multiply_float8(packed, scales, self.packed, self.scales, self.bias, inputs.dtype).reshape(
            *inputs.shape[:-1], self.out_features
        )

    def extra_repr(self) -> str:
        """Return the layer's sizes and whether it has a bias, as shown by `print(model)`."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each row of a matrix to float8; return the quantized rows and their scales."""
    scales = rows.abs().amax(1, keepdim=True).to(torch.float32).clamp_min(_MIN_ROW_MAX) / _MAX_FLOAT8
    return (rows.to(torch.float32) / scales).to(FLOAT8), scales


def multiply_float8(
    rows: torch.Tensor,
    row_scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Multiply float8 rows by a transposed float8 weight, add the bias and return the result in `dtype`."""
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
    """Raise `Float8NotSupportedError` if float8 matrix products are not supported or are inaccurate on the device."""
    layer = torch.nn.Linear(32, 32, device=device, dtype=dtype)
    rows = torch.linspace(-1, 1, 32 * 32, device=device, dtype=dtype).reshape(32, 32)
    with torch.no_grad():
        exact = layer(rows).float()
        try:
            product = Float8Linear(layer)(rows).float()
        except (RuntimeError, ValueError) as error:  # torch has no error class for operations that are not supported
            if is_out_of_memory(error):
                raise
            raise Float8NotSupportedError(first_line(error)) from error
    error_share = float((product - exact).norm() / exact.norm())
    # float8_e4m3fn has 3 mantissa bits, so a few percent are normal. The negation also catches NaN.
    if not error_share < 0.1:
        raise Float8NotSupportedError(
            f"float8 matrix products have a relative error of {error_share:.0%}, but at most 10% is allowed"
        )
