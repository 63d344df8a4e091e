"""Loading of files with 8-bit weights and scales, which diffusers drops."""

import itertools
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers as typed_diffusers
import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

import anyaccel
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.errors import ModelError
from anyaccel.quantized_weights.dequantized_linear import DequantizedLinear
from anyaccel.quantized_weights.replace_layers import list_formats
from anyaccel.quantized_weights.scaled_weight import ScaledWeight
from anyaccel.recipes import run
from tests.conftest import NEEDS_RECIPES
from tests.quantized_weights.quantizers import RECIPE
from tests.quantized_weights.scaled_files import LAYOUTS, dequantize, quantize, write_scaled_file

pytestmark = NEEDS_RECIPES
diffusers: Any = typed_diffusers
FLOAT8 = {"fp8-e4m3": torch.float8_e4m3fn, "fp8-e5m2": torch.float8_e5m2}
FILE = "transformer/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flux")
    pipe: Any = RECIPE.make()
    pipe.save_pretrained(folder)
    return folder


def check_weights(model: Any, expected: Mapping[str, torch.Tensor], form: str) -> None:
    """Check that linear layers have the values of the file, and that most of them keep its format."""
    assert list_formats(model).keys() == {form}
    layers = dict(model.named_modules())
    for name, weight in expected.items():
        layer, _, kind = name.rpartition(".")
        assert torch.equal(getattr(layers[layer], kind), weight), name
    assert sum(isinstance(layer, DequantizedLinear) for layer in layers.values()) > 10


@pytest.mark.parametrize(
    ("form", "layout"),
    [*itertools.product(FLOAT8, LAYOUTS), *itertools.product(["int8"], ["comfyui-2025", "rows", "blocks"])],
)
def test_a_transformer_from_a_file_keeps_codes_and_scales(form: str, layout: str, saved: Path, tmp_path: Path) -> None:
    file = tmp_path / "flux.safetensors"
    expected = write_scaled_file(saved / FILE, file, FLOAT8.get(form, torch.int8), layout)
    pipe = anyaccel.DiffusionPipeline.from_pretrained(saved, transformer=file, dtype="float32")
    check_weights(pipe.transformer, expected, form)
    assert "quantization_config" not in pipe.transformer.config


@pytest.mark.parametrize("layout", ["unscaled", "comfyui"])
def test_a_folder_and_a_file_with_a_config_give_the_image_of_the_values(
    layout: str, saved: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "folder"))
    values = write_scaled_file(saved / FILE, folder / FILE, torch.float8_e4m3fn, layout)
    plain: Any = RECIPE.make()
    plain.transformer.load_state_dict(values)
    expected = run(RECIPE, plain)
    for arguments in ({"pretrained_model_name_or_path": folder}, {"pretrained_model_name_or_path": folder / FILE}):
        config = {"config": saved} if Path(*arguments.values()).is_file() else {}
        pipe = anyaccel.DiffusionPipeline.from_pretrained(*arguments.values(), dtype="float32", **config)
        check_weights(pipe.transformer, values, "fp8-e4m3")
        numpy.testing.assert_allclose(run(RECIPE, pipe), expected, atol=1e-6)
    # diffusers ignores the scales. If this fails, `use_file_weights` may be no longer needed for folders.
    stock = diffusers.FluxTransformer2DModel.from_pretrained(folder, subfolder="transformer")
    name = "transformer_blocks.0.attn.to_q.weight"
    assert torch.equal(stock.get_parameter(name), values[name]) is (layout == "unscaled")


def test_a_folder_in_shards(saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "folder"))
    values = write_scaled_file(saved / FILE, folder / FILE, torch.float8_e4m3fn, "rows")
    tensors = load_file(folder / FILE)
    (folder / FILE).unlink()
    names = sorted(tensors)
    files: dict[str, str] = {}
    for shard in range(2):  # a scale is in the same file as its weight
        part = {
            name: tensors[name] for name in names if (name.rpartition(".")[0] < names[len(names) // 2]) == (shard == 0)
        }
        files |= dict.fromkeys(part, f"diffusion_pytorch_model-0000{shard + 1}-of-00002.safetensors")
        save_file(part, folder / "transformer" / next(reversed(files.values())))
    index = folder / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    pipe = anyaccel.DiffusionPipeline.from_pretrained(folder, dtype="float32")
    check_weights(pipe.transformer, values, "fp8-e4m3")


@pytest.mark.parametrize("is_folder", [True, False])
def test_text_encoders(is_folder: bool, saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "folder"))
    file = folder / "text_encoder_2/model.safetensors"
    values = write_scaled_file(saved / "text_encoder_2/model.safetensors", file, torch.float8_e4m3fn, "comfyui")
    if is_folder:
        pipe = anyaccel.DiffusionPipeline.from_pretrained(folder, dtype="float32")
    else:
        pipe = anyaccel.DiffusionPipeline.from_pretrained(saved, text_encoder_2=str(file), dtype="float32")
    plain: Any = RECIPE.make()
    plain.text_encoder_2.load_state_dict(values, strict=False)
    assert list_formats(pipe.text_encoder_2).keys() == {"fp8-e4m3"}
    numpy.testing.assert_allclose(run(RECIPE, pipe), run(RECIPE, plain), atol=1e-6)


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_codes_stay_on_the_device(device: str, saved: Path, tmp_path: Path) -> None:
    file = tmp_path / "flux.safetensors"
    values = write_scaled_file(saved / FILE, file, torch.float8_e4m3fn, "rows")
    plain: Any = RECIPE.make()
    plain.transformer.load_state_dict(values)
    expected = run(RECIPE, plain)

    def use(accelerator: VirtualAccelerator) -> tuple[Any, str, set[Any]]:
        pipe = anyaccel.DiffusionPipeline.from_pretrained(saved, transformer=file, dtype="float32").to(
            f"virtual:{device}"
        )
        layers = [layer for layer in pipe.transformer.modules() if isinstance(layer, DequantizedLinear)]
        natives = {(layer.get_buffer("codes").dtype, layer.format.native) for layer in layers}  # type: ignore[attr-defined]
        return run(RECIPE, pipe), str(pipe.plan.dequantized), natives

    image, decision, natives = run_forked(device, use)
    numpy.testing.assert_allclose(image, expected, atol=1e-5)
    if device == "xpu":  # has float8_e4m3fn
        assert (decision, natives) == ("-", {(torch.uint8, torch.float8_e4m3fn)})
    else:
        assert (decision, natives) == ("transformer → fp8-e4m3", {(torch.uint8, None)})


def test_another_quantizer_gets_the_values(saved: Path, tmp_path: Path) -> None:
    pytest.importorskip("optimum.quanto")
    folder = Path(shutil.copytree(saved, tmp_path / "folder"))
    values = write_scaled_file(saved / FILE, folder / FILE, torch.float8_e4m3fn, "comfyui")
    config = diffusers.PipelineQuantizationConfig(
        quant_mapping={"transformer": diffusers.QuantoConfig(weights_dtype="int8")}
    )
    pipe = anyaccel.DiffusionPipeline.from_pretrained(folder, dtype="float32", quantization_config=config)
    layer = pipe.transformer.transformer_blocks[0].attn.to_q
    torch.testing.assert_close(
        layer.weight.dequantize(), values["transformer_blocks.0.attn.to_q.weight"], atol=0.02, rtol=0.02
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"comfy_quant": torch.tensor(list(b'{"format": "nvfp4"}'), dtype=torch.uint8)}, "format nvfp4"),
        (
            {"comfy_quant": torch.tensor(list(b'{"format": "int8_tensorwise", "convrot": true}'), dtype=torch.uint8)},
            "with rotated activations",
        ),
        ({"weight_scale_2": torch.ones(())}, "with `weight_scale_2`"),
        ({"weight_scale": torch.ones(5) / 2}, r"which \(5,\) scales do not divide"),
        (
            {"weight": torch.ones(32, 32, dtype=torch.float16), "weight_scale": torch.ones(()) / 2},
            "dtype torch.float16",
        ),
    ],
)
def test_other_layouts_are_rejected(change: dict[str, torch.Tensor], message: str, saved: Path, tmp_path: Path) -> None:
    file, layer = tmp_path / "flux.safetensors", "transformer_blocks.0.attn.to_q"
    write_scaled_file(saved / FILE, file, torch.float8_e4m3fn, "rows")
    save_file(load_file(file) | {f"{layer}.{name}": value for name, value in change.items()}, file)
    with pytest.raises(ModelError, match=message) as caught:
        anyaccel.DiffusionPipeline.from_pretrained(saved, transformer=file)
    assert str(file) in caught.value.message
    assert layer in caught.value.message


@pytest.mark.parametrize("dtype", [*FLOAT8.values(), torch.int8])
def test_functions_of_torch_never_see_codes_without_scales(dtype: torch.dtype) -> None:
    tensors = {"layer.weight": torch.randn(48, 32)}
    quantized = quantize(tensors, dtype, "blocks")
    values = dequantize(quantized, tensors)["layer.weight"]
    weight = ScaledWeight.make(quantized["layer.weight"], quantized["layer.weight_scale_inv"].repeat_interleave(16, 0))
    assert torch.equal(weight.to(torch.float32), values)
    parts = weight.chunk(3)
    assert all(isinstance(part, ScaledWeight) for part in parts)
    joined: Any = torch.cat([parts[2], parts[0]])
    assert isinstance(joined, ScaledWeight)
    assert torch.equal(joined.dequantize(), torch.cat([values[32:], values[:16]]))
    form, content = joined.contiguous().quantized()  # type: ignore[attr-defined]
    assert torch.equal(form.dequantize(content), joined.dequantize())
    for function in (lambda x: x[:5], lambda x: x.T, lambda x: x * 2, lambda x: x.split(16, 1)[1], lambda x: x.max()):
        assert torch.equal(function(weight), function(values))
    assert torch.equal(torch.cat([weight, values]), torch.cat([values, values]))
    with pytest.raises(RuntimeError, match="detach"):
        torch.nn.Parameter(weight, requires_grad=False)
