"""The functions of diffusers and quanto that read quantized weights."""

import gguf
import numpy
import pytest
import torch
from diffusers.quantizers.gguf.utils import dequantize_functions

from anyaccel.upstream.gguf_internals import dequantize_blocks, name_kind, read_kinds
from anyaccel.upstream.quanto_internals import read_quanto_tensors


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1", "BF16"])
def test_blocks_have_the_values_of_the_gguf_package(kind: str) -> None:
    quantization = gguf.GGMLQuantizationType[kind]
    values = numpy.random.default_rng(0).normal(size=(4, 64)).astype(numpy.float32)
    data = gguf.quantize(values, quantization)
    actual = dequantize_blocks(torch.from_numpy(data.view(numpy.uint8)), int(quantization)).reshape(4, 64)
    # diffusers multiplies in float16.
    numpy.testing.assert_allclose(actual.float(), gguf.dequantize(data, quantization), atol=3e-3)


def test_all_quantizations_of_diffusers_are_known() -> None:
    assert read_kinds() == {int(kind) for kind in dequantize_functions}
    assert {name_kind(kind) for kind in read_kinds()} >= {"Q8_0", "Q4_0", "Q4_K", "Q6_K", "IQ4_XS"}


@pytest.mark.parametrize("name", ["qint8", "qint4", "qint2", "qfloat8_e4m3fn"])
def test_tensors_of_quanto(name: str) -> None:
    quanto = pytest.importorskip("optimum.quanto")
    layer = torch.nn.Linear(128, 16)
    assert read_quanto_tensors(layer.weight) is None
    quantized = quanto.QLinear.from_module(layer, weights=getattr(quanto, name))
    quantized.freeze()
    codes, scales, offsets, bits = read_quanto_tensors(quantized.weight)  # type: ignore[misc]
    values = codes.float().reshape(scales.numel(), -1) * scales.reshape(-1, 1)
    values = values if offsets is None else values + offsets.reshape(-1, 1)
    torch.testing.assert_close(values.reshape(16, 128), quantized.weight.dequantize())
    assert bits == {"qint4": 4, "qint2": 2}.get(name, 8)
