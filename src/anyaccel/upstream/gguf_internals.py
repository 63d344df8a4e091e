"""Functions of diffusers that dequantize GGUF weights, and functions and tables of the gguf package."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = [
    "dequantize_blocks", "is_installed", "is_language_model", "name_kind", "quantize_blocks", "read_block_sizes",
    "read_kinds",
]  # fmt: skip

# diffusers/quantizers/gguf/utils.py, seen in diffusers 0.35 to 0.42; the functions are not part of its API.


def is_installed() -> bool:
    """Return whether the gguf package is installed."""
    return importlib.util.find_spec("gguf") is not None


def dequantize_blocks(data: torch.Tensor, kind: int) -> torch.Tensor:
    """Return the values of a tensor of GGUF blocks, whose last dimension counts bytes."""
    import gguf
    from diffusers.quantizers.gguf.utils import GGML_QUANT_SIZES, dequantize_functions

    quantization = gguf.GGMLQuantizationType(kind)
    block_size, type_size = GGML_QUANT_SIZES[quantization]
    values: torch.Tensor = dequantize_functions[quantization](data.reshape(-1, type_size), block_size, type_size)
    return values


def quantize_blocks(values: torch.Tensor, name: str) -> tuple[torch.Tensor, int]:
    """Return a matrix in float32 as GGUF blocks of the quantization with this name, and the number of the quantization.

    Blocks of a tensor on `meta` are on `meta`, too.
    """
    import gguf
    import torch

    kind = gguf.GGMLQuantizationType[name]
    count, size = gguf.GGML_QUANT_SIZES[kind]
    if values.is_meta:
        return values.new_empty((values.shape[0], values.shape[1] // count * size), dtype=torch.uint8), int(kind)
    return torch.from_numpy(gguf.quantize(values.numpy(), kind)), int(kind)


def name_kind(kind: int) -> str:
    """Return the name of a quantization: `Q4_0`."""
    import gguf

    names = {int(known): known.name for known in gguf.GGMLQuantizationType}
    return names.get(kind, f"number {kind}")


def read_kinds() -> frozenset[int]:
    """Return the quantizations that diffusers can dequantize."""
    from diffusers.quantizers.gguf.utils import dequantize_functions

    return frozenset(map(int, dequantize_functions))


def read_block_sizes() -> dict[int, tuple[int, int]]:
    """Return the weights per block and the bytes per block of each type that the gguf package knows."""
    import gguf

    return {int(kind): (int(count), int(size)) for kind, (count, size) in gguf.GGML_QUANT_SIZES.items()}


def is_language_model(architecture: str) -> bool:
    """Return whether llama.cpp runs models of an architecture; converters of diffusion models use other names."""
    import gguf

    return architecture in gguf.MODEL_ARCH_NAMES.values()
