"""The functions of diffusers and quanto that read quantized weights."""

from pathlib import Path
from typing import Any

import diffusers as typed_diffusers
import gguf
import numpy
import pytest
import torch
from diffusers.quantizers.gguf.utils import dequantize_functions
from safetensors.torch import save_file

from anyaccel.quantized_weights.file_quantizer import FileQuantizer, FileWeightsConfig
from anyaccel.upstream.diffusers_quantizers import (
    find_single_file_error,
    forget_quantization_config,
    use_file_weights,
)
from anyaccel.upstream.gguf_internals import (
    dequantize_blocks,
    is_language_model,
    name_kind,
    read_block_sizes,
    read_kinds,
)
from anyaccel.upstream.quanto_internals import read_quanto_tensors

diffusers: Any = typed_diffusers


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


def test_names_of_gguf_types() -> None:
    assert name_kind(int(gguf.GGMLQuantizationType.MXFP4)) == "MXFP4"
    assert name_kind(9999) == "number 9999"
    assert read_block_sizes()[int(gguf.GGMLQuantizationType.Q8_0)] == (32, 34)


@pytest.mark.parametrize(
    ("architecture", "expected"), [("llama", True), ("t5encoder", True), ("flux", False), ("wan", False)]
)
def test_language_models_of_llama_cpp(architecture: str, expected: bool) -> None:
    assert is_language_model(architecture) is expected


def test_readers_of_diffusers_are_replaced_and_restored(tmp_path: Path) -> None:
    from diffusers.loaders import single_file_utils
    from diffusers.models import model_loading_utils, modeling_utils
    from diffusers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    modules = [modeling_utils, model_loading_utils, single_file_utils]
    before = [module.load_state_dict for module in modules], dict(AUTO_QUANTIZER_MAPPING)
    file = tmp_path / "weights.safetensors"
    save_file({"weight": torch.ones(2)}, file)
    with use_file_weights(lambda tensors, path: {path.name: tensors}, FileQuantizer, FileWeightsConfig):
        for module in modules:
            assert set(module.load_state_dict(file)) == {file.name}
            assert module.load_state_dict({"a": 1}) == {"a": 1}
        assert AUTO_QUANTIZER_MAPPING[FileWeightsConfig().quant_method.value] is FileQuantizer
    assert before == ([module.load_state_dict for module in modules], AUTO_QUANTIZER_MAPPING)


def test_a_config_without_a_quantization_config() -> None:
    model = diffusers.UNet1DModel(
        block_out_channels=(8, 8), layers_per_block=1, norm_num_groups=4,
        down_block_types=("DownBlock1DNoSkip", "DownBlock1D"), up_block_types=("UpBlock1D", "UpBlock1DNoSkip"),
    )  # fmt: skip
    expected = dict(model.config)
    model.register_to_config(quantization_config=FileWeightsConfig(), _pre_quantization_dtype=torch.float32)
    forget_quantization_config(model)
    assert dict(model.config) == expected


def test_the_error_for_a_file_without_a_model(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2)}, tmp_path / "weights.safetensors")
    (tmp_path / "config.json").write_text('{"_class_name": "UNet2DConditionModel"}')
    with pytest.raises(find_single_file_error()):
        diffusers.UNet2DConditionModel.from_single_file(str(tmp_path / "weights.safetensors"), config=str(tmp_path))
