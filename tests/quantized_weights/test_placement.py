"""Pipelines with quantized weights on virtual devices, which have no kernels for them."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

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
