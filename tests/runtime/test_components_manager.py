"""Modular pipelines whose models are offloaded by a components manager of diffusers."""

from pathlib import Path
from typing import Any

import diffusers
import numpy
import pytest

import anyaccel
from anyaccel.emulator.run_forked import run_forked
from anyaccel.recipes import recipes, run
from tests.conftest import NEEDS_RECIPES

pytestmark = [NEEDS_RECIPES, pytest.mark.filterwarnings("ignore::FutureWarning")]
LIBRARY: Any = diffusers
RECIPE = recipes()["stable-diffusion-xl-modular"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("xl")
    pipe: Any = RECIPE.make()
    pipe.save_pretrained(str(folder), overwrite_modular_index=True)
    return folder


@pytest.mark.parametrize(
    ("enabled", "device"),
    [("before loading", "mps"), ("before the first call", "neuron"), ("after a call on the CPU", "mps")],
)
def test_a_manager_offloads_a_pipeline_that_is_not_placed(enabled: str, device: str, folder: Path) -> None:
    expected = run(RECIPE, RECIPE.make())

    def use(_: Any) -> Any:
        manager = LIBRARY.ComponentsManager()
        if enabled == "before loading":
            manager.enable_auto_cpu_offload(device=device)
        pipe = anyaccel.ModularPipeline.from_pretrained(folder, components_manager=manager)
        if enabled == "after a call on the CPU":
            run(RECIPE, pipe)
        if enabled != "before loading":
            manager.enable_auto_cpu_offload(device=device)
        devices = []
        pipe.unet.conv_in.register_forward_hook(lambda layer, *_: devices.append(layer.weight.device.type))
        images = [run(RECIPE, pipe), run(RECIPE, pipe)]
        planned = pipe.plan.device
        manager.disable_auto_cpu_offload()
        images.append(run(RECIPE, pipe))
        return images, planned, devices, pipe.plan.device

    images, planned, devices, last = run_forked(device, use)
    for image in images:
        assert numpy.abs(image - expected).max() < 2e-3
    assert planned == f"{device}:0"
    assert set(devices[: len(devices) * 2 // 3]) == {device}
    assert set(devices[len(devices) * 2 // 3 :]) == {"cpu"}
    assert last == "cpu:0"


@pytest.mark.parametrize("method", ["enable_model_cpu_offload", "enable_sequential_cpu_offload"])
def test_methods_that_modular_pipelines_do_not_have(method: str) -> None:
    pipe: Any = anyaccel.place(RECIPE.make(), "cpu")
    with pytest.raises(anyaccel.AnyaccelError, match=f"which has no method {method}") as caught:
        getattr(pipe, method)()
    assert "components manager" in caught.value.hint
