"""The kernels of `torch_npu` that diffusers calls by name, in plain operations of torch."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

__all__ = ["ASCEND_KERNELS"]


def npu_fusion_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_num: int, input_layout: str, **options: Any
) -> tuple[torch.Tensor, ...]:
    """Attention in the layouts that diffusers uses; a mask says what to leave out."""
    hidden = options.get("atten_mask")
    keep = None if hidden is None else ~hidden.bool()
    mixed = functional.scaled_dot_product_attention(
        _split_heads(query, head_num, input_layout),
        _split_heads(key, head_num, input_layout),
        _split_heads(value, head_num, input_layout),
        attn_mask=keep,
        scale=options.get("scale"),
    )
    return (_join_heads(mixed, input_layout),)


def npu_geglu(hidden: torch.Tensor, dim: int = -1, approximate: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """The first half times the GELU of the second; `approximate=1` is the one with tanh."""
    kept, gate = hidden.chunk(2, dim=dim)
    opened = functional.gelu(gate, approximate="tanh" if approximate else "none")
    return kept * opened, opened


def npu_rms_norm(
    hidden: torch.Tensor, weight: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """Root mean square normalisation, and the factor it used."""
    factor = torch.rsqrt(hidden.float().pow(2).mean(-1, keepdim=True) + epsilon)
    return (hidden.float() * factor).to(hidden.dtype) * weight, factor


def _split_heads(part: torch.Tensor, heads: int, layout: str) -> torch.Tensor:
    if layout == "BSH":
        return part.reshape(*part.shape[:-1], heads, -1).transpose(1, 2)
    return part.transpose(1, 2) if layout == "BSND" else part


def _join_heads(mixed: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "BSH":
        return mixed.transpose(1, 2).flatten(-2)
    return mixed.transpose(1, 2) if layout == "BSND" else mixed


ASCEND_KERNELS = {
    "npu_fusion_attention": npu_fusion_attention,
    "npu_geglu": npu_geglu,
    "npu_rms_norm": npu_rms_norm,
}
