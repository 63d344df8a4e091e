"""Weights of layers of diffusers' own quantizers, as plain tensors."""

import gguf
import pytest
import torch
from diffusers.quantizers.bfl.utils import (
    BFLFP8RLinear,
    BFLNVFP4Linear,
    dequantize_fp8r,
    dequantize_nvfp4,
    quantize_fp8r,
    quantize_nvfp4,
)
from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter, dequantize_functions, dequantize_gguf_tensor

from anyaccel.quantized_weights.library_layers import read_library, read_weight


@pytest.mark.parametrize("kind", sorted(kind.name for kind in dequantize_functions))
def test_gguf(kind: str) -> None:
    quantization = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[quantization]
    # Small codes: bytes of random float16 scales could be NaN.
    data = torch.randint(0, 60, (8, 256 // block * size), dtype=torch.uint8)
    layer = GGUFLinear(256, 8, compute_dtype=torch.float32)
    layer.weight = GGUFParameter(data, quant_type=quantization)
    assert read_library(layer) == "diffusers"
    form, parts = read_weight(layer)  # type: ignore[misc]
    assert form.name == f"gguf:{kind}"
    assert torch.equal(form.dequantize(parts), dequantize_gguf_tensor(layer.weight).float())


def test_bfl_float8() -> None:
    weight, scale = quantize_fp8r(torch.randn(8, 32))
    layer = BFLFP8RLinear(32, 8, compute_dtype=torch.float32)
    layer.weight, layer.weight_scale = torch.nn.Parameter(weight, requires_grad=False), scale
    form, parts = read_weight(layer)  # type: ignore[misc]
    assert parts["codes"].dtype is torch.uint8
    assert torch.equal(form.dequantize(parts), dequantize_fp8r(weight, scale))


def test_bfl_nvfp4() -> None:
    weight, scale, second_scale = quantize_nvfp4(torch.randn(8, 32))
    layer = BFLNVFP4Linear(32, 8, compute_dtype=torch.float32)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.weight_scale, layer.weight_scale_2 = scale, second_scale
    form, parts = read_weight(layer)  # type: ignore[misc]
    assert {part.dtype for part in parts.values()} == {torch.uint8, torch.float32}
    torch.testing.assert_close(form.dequantize(parts), dequantize_nvfp4(weight, scale, second_scale))
