"""Pipelines with quantized weights on virtual devices, which have no kernels for them."""

import copy
import functools
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from peft import LoraConfig

import anyaccel
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.quantized_weights.dequantized_linear import DequantizedLinear
from anyaccel.quantized_weights.replace_layers import list_formats, replace_quantized_layers
from anyaccel.recipes import run
from tests.conftest import NEEDS_RECIPES
from tests.emulator.forked import DEVICES
from tests.quantized_weights.quantizers import FORMATS, RECIPE, make_pipeline

pytestmark = [
    NEEDS_RECIPES,
    # diffusers will drop quanto in 1.0.
    pytest.mark.filterwarnings("ignore:`Quanto\\w+` is deprecated:FutureWarning"),
]
QUICK = ("gguf-Q4_0", "float8_e4m3fn")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flux")
    pipe: Any = RECIPE.make()
    pipe.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", FORMATS)
def test_layers_keep_the_values_of_the_library(name: str, saved: Path, tmp_path: Path) -> None:
    plain, pipe = RECIPE.make(), make_pipeline(FORMATS[name], saved, tmp_path)
    with torch.no_grad():
        expected = run(RECIPE, pipe)
    replace_quantized_layers(pipe.transformer, lambda library: False)
    assert sum(list_formats(pipe.transformer).values()) > 10
    # bitsandbytes multiplies 8-bit activations, and dequantizes rows that are shorter than a block wrongly on the CPU.
    allowed = {"bitsandbytes-int8": 0.05, "bitsandbytes-nf4": 1.0, "bitsandbytes-fp4": 1.0}.get(name, 1e-5)
    numpy.testing.assert_allclose(run(RECIPE, pipe), expected, atol=allowed)
    assert numpy.abs(run(RECIPE, pipe) - run(RECIPE, plain)).max() < (0.9 if "int2" in name else 0.3)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        # All formats on one device, and two formats on all devices; the rest runs with `make test-slow`.
        pytest.param(device, name, marks=() if device == "mps" or name in QUICK else pytest.mark.slow)
        for device in DEVICES
        for name in FORMATS
    ],
)
def test_a_placed_pipeline_gives_the_image_of_the_cpu(device: str, name: str, saved: Path, tmp_path: Path) -> None:
    pipe: Any = make_pipeline(FORMATS[name], saved, tmp_path)
    on_cpu: Any = make_pipeline(FORMATS[name], saved, tmp_path)
    replace_quantized_layers(on_cpu.transformer, lambda library: False)
    expected = run(RECIPE, on_cpu)

    def use(accelerator: VirtualAccelerator) -> tuple[Any, str, set[torch.dtype]]:
        placed = anyaccel.place(pipe, f"virtual:{accelerator.name}", dtype="float32")
        image = run(RECIPE, placed)
        layers = [layer for layer in placed.transformer.modules() if isinstance(layer, DequantizedLinear)]
        return image, str(placed.plan.dequantized), {layer.get_buffer("codes").dtype for layer in layers}

    image, decision, dtypes = run_forked(device, use)
    numpy.testing.assert_allclose(image, expected, atol=1e-5)
    if (device, name) == ("xpu", "float8_e4m3fn"):
        assert (decision, dtypes) == ("-", set())  # native
    else:
        assert "transformer" in decision
        assert dtypes <= {torch.uint8, torch.int8}


def test_weights_stay_small_and_scales_exact(saved: Path, tmp_path: Path) -> None:
    model = make_pipeline(FORMATS["float8_e4m3fn"], saved, tmp_path).transformer
    replace_quantized_layers(model, lambda library: False)
    layer = next(layer for layer in model.modules() if isinstance(layer, DequantizedLinear))
    before, codes = layer.weight, layer.get_buffer("codes")
    model.to(torch.bfloat16)
    assert layer.get_buffer("codes") is codes
    assert layer.get_buffer("scales").dtype is torch.float32
    assert layer.weight.dtype is torch.bfloat16
    torch.testing.assert_close(layer.weight.float(), before, atol=1e-2, rtol=1e-2)
    assert codes.numel() == before.numel()


@pytest.mark.parametrize("name", ["gguf-Q4_0", "float8_e4m3fn"])
def test_other_uses_of_a_placed_pipeline(name: str, saved: Path, tmp_path: Path) -> None:
    def make() -> Any:
        return make_pipeline(FORMATS[name], saved, tmp_path)

    def make_on_cpu() -> Any:
        pipe = make()
        replace_quantized_layers(pipe.transformer, lambda library: False)
        return pipe

    def add_lora(pipe: Any) -> Any:
        torch.manual_seed(0)
        pipe.transformer.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k"], init_lora_weights=False))
        return pipe

    expected, with_lora = run(RECIPE, make_on_cpu()), run(RECIPE, add_lora(make_on_cpu()))
    assert numpy.abs(with_lora - expected).max() > 0.05

    def use(accelerator: VirtualAccelerator) -> None:
        for memory in ("phase", "layer"):
            placed = anyaccel.place(make(), "virtual:mps", dtype="float32", memory=memory)
            numpy.testing.assert_allclose(run(RECIPE, placed), expected, atol=1e-5)
        numpy.testing.assert_allclose(run(RECIPE, copy.deepcopy(placed)), expected, atol=1e-5)
        # In half precision, which the device prefers, the layers compute in half precision too.
        half = anyaccel.place(make(), "virtual:mps")
        assert half.plan.dtype.value == "float16"
        numpy.testing.assert_allclose(run(RECIPE, half), expected, atol=0.05)
        placed = anyaccel.place(make(), "virtual:mps", dtype="float32")
        numpy.testing.assert_allclose(run(RECIPE, add_lora(placed)), with_lora, atol=1e-5)
        for method in (placed.fuse_lora, functools.partial(placed.save_pretrained, tmp_path / "saved")):
            with pytest.raises(anyaccel.AnyaccelError, match=r"the device dequantizes the .* weights of transformer"):
                method()
        placed.transformer.fuse_lora()
        with pytest.raises(anyaccel.AnyaccelError, match="adapters cannot be fused into the quantized weights"):
            run(RECIPE, placed)
        placed.transformer.unfuse_lora()
        numpy.testing.assert_allclose(run(RECIPE, placed), with_lora, atol=1e-5)
        with pytest.raises(ValueError, match="not serializable"):
            placed.transformer.save_pretrained(tmp_path / "saved")

    run_forked("mps", use)


def test_a_model_can_be_dequantized(saved: Path, tmp_path: Path) -> None:
    pipe = make_pipeline(FORMATS["gguf-Q8_0"], saved, tmp_path)
    replace_quantized_layers(pipe.transformer, lambda library: False)
    expected = run(RECIPE, pipe)
    pipe.transformer.dequantize()
    assert list_formats(pipe.transformer) == {}
    numpy.testing.assert_allclose(run(RECIPE, pipe), expected, atol=1e-5)
    pipe.save_pretrained(tmp_path / "plain")


def test_layerwise_casting_is_not_undone_by_a_cast(saved: Path, tmp_path: Path) -> None:
    def make() -> Any:
        pipe: Any = RECIPE.make()
        pipe.to(torch.bfloat16)
        pipe.transformer.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
        return pipe

    def use(accelerator: VirtualAccelerator) -> tuple[Any, set[torch.dtype], str]:
        pipe = make()
        pipe.vae.to(torch.float32)
        # The VAE is cast. A cast of the transformer would need twice its memory until the first call.
        placed = anyaccel.place(pipe, f"virtual:{accelerator.name}", dtype="bfloat16")
        dtypes = {weight.dtype for weight in placed.transformer.transformer_blocks.parameters()}
        return run(RECIPE, placed), dtypes, str(placed.vae.dtype)

    image, dtypes, vae_dtype = run_forked("xpu", use)
    assert torch.float8_e4m3fn in dtypes
    assert vae_dtype == "torch.bfloat16"
    numpy.testing.assert_allclose(image, run(RECIPE, make()), atol=0.02)
