"""The predicted memory of pipelines with quantized weights, compared with the memory that virtual devices measure."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import anyaccel
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.quantized_weights.library_layers import read_library, read_weight
from anyaccel.quantized_weights.stored_tensors import count_stored_bytes
from anyaccel.recipes import run
from anyaccel.runtime.call_request import read_call_request
from anyaccel.runtime.introspection import plain_class
from anyaccel.runtime.placement.memory_plan import forecast_call
from anyaccel.runtime.placement_state import find_placement
from anyaccel.tracing.meta_clone import copy_without_weights
from tests.conftest import NEEDS_RECIPES
from tests.quantized_weights.quantizers import FORMATS, RECIPE, make_pipeline

pytestmark = [
    NEEDS_RECIPES,
    # diffusers will drop quanto in 1.0.
    pytest.mark.filterwarnings("ignore:`Quanto\\w+` is deprecated:FutureWarning"),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flux")
    pipe: Any = RECIPE.make()
    pipe.save_pretrained(folder)
    return folder


def predict(pipe: Any) -> int:
    placement = find_placement(pipe)
    assert placement is not None
    request = read_call_request(pipe, plain_class(pipe).__call__, (), RECIPE.call())
    return forecast_call(pipe, placement, request).peak_bytes


def compare(accelerator: VirtualAccelerator, pipe: Any) -> tuple[int, int]:
    """Return the predicted and the measured peak of a call."""
    device = f"virtual:{accelerator.name}"
    placed = anyaccel.place(pipe, device, dtype="float32")
    predicted = predict(placed)
    anyaccel.reset_peak_memory(device)
    run(RECIPE, placed)
    return predicted, anyaccel.max_memory(device)


# XPU is the only virtual device on which diffusers' layerwise casting to float8 runs natively.
@pytest.mark.parametrize(
    ("device", "name"), [*(("mps", name) for name in FORMATS), ("xpu", "float8_e4m3fn"), ("xpu", "float8_e5m2")]
)
def test_the_predicted_memory_is_within_6_percent(device: str, name: str, saved: Path, tmp_path: Path) -> None:
    pipe = make_pipeline(FORMATS[name], saved, tmp_path)
    predicted, measured = run_forked(device, functools.partial(compare, pipe=pipe))
    assert measured <= predicted <= 1.06 * measured


@pytest.mark.parametrize("name", [name for name in FORMATS if not name.startswith("float8")])
def test_the_copy_for_the_prediction_has_the_size_of_the_quantized_weights(
    name: str, saved: Path, tmp_path: Path
) -> None:
    model = make_pipeline(FORMATS[name], saved, tmp_path).transformer
    layers = [layer for layer in model.modules() if read_library(layer)]
    assert len(layers) > 10
    stored = sum(map(count_stored_bytes, layers))
    biases = sum(layer.bias.nbytes for layer in layers if getattr(layer, "bias", None) is not None)
    others = {id(weight): weight for layer in model.modules() for weight in layer.parameters(recurse=False)}
    for layer in layers:
        for weight in layer.parameters(recurse=False):
            others.pop(id(weight))
    plain = sum(weight.nbytes for weight in others.values())
    copied = copy_without_weights(model)
    assert sum(weight.nbytes for weight in copied.parameters()) == stored + biases + plain
    assert {weight.device.type for weight in copied.parameters()} == {"meta"}


@pytest.mark.parametrize("name", [name for name in FORMATS if not name.startswith("float8")])
def test_all_tensors_of_a_weight_are_counted(name: str, saved: Path, tmp_path: Path) -> None:
    model = make_pipeline(FORMATS[name], saved, tmp_path).transformer
    layer = next(layer for layer in model.modules() if read_library(layer))
    found = read_weight(layer)
    assert found is not None
    form, parts = found
    # Shared tables and padding differ; the codes and scales are the same.
    expected = sum(parts[part].nbytes for part in ("codes", "scales") if part in parts)
    tables = 4 * (16 + 256 + 256 + 2)
    assert expected <= count_stored_bytes(layer) <= 1.2 * expected + tables
    assert count_stored_bytes(layer) < torch.Size(form.shape).numel() * 4
