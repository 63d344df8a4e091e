"""The `torch_npu` kernels that diffusers calls by name, implemented with torch operations.

Documentation: https://hiascend.com/document/detail/zh/Pytorch/60RC3/apiref/apilist/ptaoplist_000445.html
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

__all__ = ["ASCEND_KERNELS"]


def npu_fusion_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_num: int, input_layout: str, **options: Any
) -> tuple[torch.Tensor, ...]:
    """Compute attention for the input layouts that diffusers uses: BSH, BSND and BNSD."""
    # True in `atten_mask` excludes a position; in torch's `attn_mask` it includes one.
    excluded = options.get("atten_mask")
    mask = None if excluded is None else ~excluded.bool()
    output = functional.scaled_dot_product_attention(
        _split_heads(query, head_num, input_layout),
        _split_heads(key, head_num, input_layout),
        _split_heads(value, head_num, input_layout),
        attn_mask=mask,
        scale=options.get("scale"),
    )
    return (_join_heads(output, input_layout),)


def npu_geglu(hidden: torch.Tensor, dim: int = -1, approximate: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the GEGLU of a tensor, and the GELU of its second half.

    GEGLU is the first half multiplied by that GELU. `approximate=1` selects the tanh approximation.
    """
    value, gate = hidden.chunk(2, dim=dim)
    activated = functional.gelu(gate, approximate="tanh" if approximate else "none")
    return value * activated, activated


def npu_rms_norm(
    hidden: torch.Tensor, weight: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply RMS normalization; return the result and the reciprocal RMS."""
    # Computed in float32 and rounded before the weight is applied.
    factor = torch.rsqrt(hidden.float().pow(2).mean(-1, keepdim=True) + epsilon)
    return (hidden.float() * factor).to(hidden.dtype) * weight, factor


def _split_heads(tensor: torch.Tensor, heads: int, layout: str) -> torch.Tensor:
    """Return the tensor as (batch, heads, sequence, head dimension), the layout of torch's attention."""
    if layout == "BSH":
        return tensor.reshape(*tensor.shape[:-1], heads, -1).transpose(1, 2)
    return tensor.transpose(1, 2) if layout == "BSND" else tensor


def _join_heads(output: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "BSH":
        return output.transpose(1, 2).flatten(-2)
    return output.transpose(1, 2) if layout == "BSND" else output


ASCEND_KERNELS = {
    "npu_fusion_attention": npu_fusion_attention,
    "npu_geglu": npu_geglu,
    "npu_rms_norm": npu_rms_norm,
}
