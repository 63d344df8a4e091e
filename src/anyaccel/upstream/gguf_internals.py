"""Functions of diffusers that dequantize GGUF weights."""

from __future__ import annotations

import torch

__all__ = ["dequantize_blocks", "name_kind", "read_kinds"]

# diffusers/quantizers/gguf/utils.py, seen in diffusers 0.35 to 0.42; the functions are not part of its API.


def dequantize_blocks(data: torch.Tensor, kind: int) -> torch.Tensor:
    """Return the values of a tensor of GGUF blocks, whose last dimension counts bytes."""
    import gguf
    from diffusers.quantizers.gguf.utils import GGML_QUANT_SIZES, dequantize_functions

    quantization = gguf.GGMLQuantizationType(kind)
    block_size, type_size = GGML_QUANT_SIZES[quantization]
    values: torch.Tensor = dequantize_functions[quantization](data.reshape(-1, type_size), block_size, type_size)
    return values


def name_kind(kind: int) -> str:
    """Return the name of a quantization: `Q4_0`."""
    import gguf

    return str(gguf.GGMLQuantizationType(kind).name)


def read_kinds() -> frozenset[int]:
    """Return the quantizations that diffusers can dequantize."""
    from diffusers.quantizers.gguf.utils import dequantize_functions

    return frozenset(map(int, dequantize_functions))
