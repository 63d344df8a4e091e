"""Files with 8-bit weights, in the layouts of ComfyUI and vendors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

__all__ = ["LAYOUTS", "dequantize", "quantize", "write_scaled_file"]

# The name of the scale and its shape: one value for the weight, one for each row, or one for each block of 16 x 16.
LAYOUTS = {
    "unscaled": ("", "tensor"),
    "comfyui": ("scale_weight", "tensor"),
    "comfyui-2025": ("weight_scale", "tensor"),
    "rows": ("weight_scale", "row"),
    "blocks": ("weight_scale_inv", "block"),
}
_BLOCK = 16


def _is_quantized(name: str, weight: torch.Tensor) -> bool:
    return name.endswith(".weight") and weight.ndim == 2 and all(size % _BLOCK == 0 for size in weight.shape)


def _make_scale(weight: torch.Tensor, largest: float, shape: str) -> torch.Tensor:
    if shape == "tensor":
        return weight.abs().max() / largest
    if shape == "row":
        return weight.abs().amax(1, keepdim=True) / largest
    blocks = weight.reshape(weight.shape[0] // _BLOCK, _BLOCK, -1, _BLOCK)
    return blocks.abs().amax((1, 3)) / largest


def _expand(scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if (scale.ndim == 2 and scale.shape[1] > 1) or scale.shape[:1] == (weight.shape[0] // _BLOCK,):
        return scale.repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)
    return scale


def quantize(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, layout: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a file with 8-bit weights in the matrices whose sizes are multiples of 16."""
    kind, shape = LAYOUTS[layout]
    largest = 127.0 if dtype is torch.int8 else torch.finfo(dtype).max
    result: dict[str, torch.Tensor] = {}
    for name, weight in tensors.items():
        if not _is_quantized(name, weight):
            result[name] = weight
            continue
        layer = name.removesuffix("weight")
        scale = _make_scale(weight, largest, shape) if kind else torch.ones(())
        codes = weight / _expand(scale, weight)
        result[name] = codes.round().to(dtype) if dtype is torch.int8 else codes.to(dtype)
        if kind:
            result[layer + kind] = scale
            result[layer + ("scale_input" if layout == "comfyui" else "input_scale")] = torch.ones(())
        if layout == "comfyui-2025":
            text = json.dumps({"format": "int8_tensorwise" if dtype is torch.int8 else "float8_e4m3fn"})
            result[f"{layer}comfy_quant"] = torch.tensor(list(text.encode()), dtype=torch.uint8)
    if layout == "comfyui":
        result["scaled_fp8"] = torch.empty(2, dtype=torch.float8_e4m3fn)
    return result


def dequantize(quantized: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the values that `quantize` has stored."""
    kinds = {kind for kind, _ in LAYOUTS.values() if kind}
    result = {}
    for name in tensors:
        weight, layer = quantized[name].to(torch.float32), name.removesuffix("weight")
        scales = [quantized[layer + kind] for kind in kinds if layer + kind in quantized]
        result[name] = weight * _expand(scales[0], weight) if scales else weight
    return result


def write_scaled_file(source: Path, target: Path, dtype: torch.dtype, layout: str) -> dict[str, torch.Tensor]:
    """Write a file with the 8-bit weights of another one, and return their values."""
    tensors = load_file(source)
    quantized = quantize(tensors, dtype, layout)
    save_file(quantized, target)
    return dequantize(quantized, tensors)
