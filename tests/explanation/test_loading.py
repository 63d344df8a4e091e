"""The predicted host memory for loading a pipeline, compared with the measured one."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

import anyaccel
from anyaccel.explanation.known_models import find_bundled_configs
from anyaccel.explanation.loading import forecast_loading
from anyaccel.planning.loading_memory import LoadingForecast, WeightBytes, predict_loading
from anyaccel.planning.memory import MemoryRule, Residence
from anyaccel.planning.options import PlacementOptions
from anyaccel.recipes import recipes
from benchmarks.loading import run_child, write_folder
from tests.conftest import NEEDS_RECIPES, RunCli

pytestmark = NEEDS_RECIPES
# Cases of the benchmark by dtype. They only set the dtype.
CASES = {"float32": "sd-float32", "bfloat16": "sdxl"}
MIB = 2**20


def read_loading(folder: Path, dtype: str) -> LoadingForecast:
    forecast = anyaccel.explain(folder, "cpu", dtype=dtype).forecast
    assert forecast is not None
    assert forecast.loading is not None
    assert forecast.to_dict()["loading"] == asdict(forecast.loading)
    return forecast.loading


def write_model(folder: Path, dtype: torch.dtype) -> dict[str, int]:
    """Write a Stable Diffusion model with a smaller denoiser and random weights, about 1 GB in half precision."""
    configs = find_bundled_configs("stable-diffusion-v1-5/stable-diffusion-v1-5")
    assert configs is not None
    shutil.copytree(configs, folder / "configs")
    config = folder / "configs" / "unet" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"block_out_channels": [192, 384, 768, 768]}))
    index = folder / "configs" / "model_index.json"
    components = json.loads(index.read_text())
    index.write_text(json.dumps({name: value for name, value in components.items() if name != "safety_checker"}))
    return write_folder(str(folder / "configs"), dtype, folder / "model")


@pytest.mark.long
@pytest.mark.parametrize(("stored", "dtype"), [("float16", "float32"), ("bfloat16", "bfloat16")])
def test_prediction_is_within_10_percent_of_the_peak(stored: str, dtype: str, tmp_path: Path) -> None:
    sizes = write_model(tmp_path, getattr(torch, stored))
    assert 0.9e9 < sum(sizes.values()) < 1.1e9
    tiny: Any = recipes()["stable-diffusion"].make()
    tiny.save_pretrained(tmp_path / "tiny")
    predicted = read_loading(tmp_path / "model", dtype)
    run = run_child("anyaccel", tmp_path / "model", tmp_path / "tiny", "cpu", CASES[dtype])
    assert "error" not in run
    assert predicted.peak_bytes == pytest.approx(max(run["anonymous_bytes"], run["used_bytes"]), rel=0.1)
    allowed = 0.1 * predicted.peak_bytes
    assert predicted.allocated_bytes == pytest.approx(run["anonymous_bytes"], abs=allowed)
    # Never two copies of the weights.
    assert max(run["anonymous_bytes"], run["used_bytes"]) <= predicted.peak_bytes + 0.1 * max(sizes.values()) + 50 * MIB


def test_only_the_largest_component_if_each_is_moved() -> None:
    weights = {"unet": WeightBytes(mapped=800, cast=0), "vae": WeightBytes(mapped=0, cast=100)}
    assert predict_loading(weights, one_at_a_time=True) == LoadingForecast(800, 100, "unet")
    assert predict_loading(weights, one_at_a_time=False) == LoadingForecast(900, 100)


def test_loading_depends_on_the_device_and_on_the_memory_mode(tmp_path: Path) -> None:
    pipe: Any = recipes()["stable-diffusion-xl"].make()
    pipe.save_pretrained(tmp_path)
    sizes = {
        name: sum(file.stat().st_size for file in (tmp_path / name).glob("*.safetensors")) // 2
        for name in ("unet", "vae", "text_encoder", "text_encoder_2")
    }

    def predict(device: str, residence: Residence, dtype: torch.dtype = torch.bfloat16) -> LoadingForecast:
        rule, options = MemoryRule(residence), PlacementOptions()
        forecast = forecast_loading(
            {name: tmp_path / name for name in sizes}, dtype, anyaccel.sheet(device), rule, options
        )
        assert forecast is not None
        return forecast

    moved, offloaded = predict("npu", "resident"), predict("npu", "component")
    assert moved.component == max(sizes, key=lambda name: sizes[name])
    assert moved.peak_bytes == pytest.approx(max(sizes.values()), rel=0.1)
    assert offloaded.component is None
    assert offloaded.peak_bytes == pytest.approx(sum(sizes.values()), rel=0.1)
    assert predict("cpu", "resident").peak_bytes == offloaded.peak_bytes
    assert predict("cpu", "resident", torch.float32).allocated_bytes == 0


def test_text_and_json(tmp_path: Path, run_cli_forked: RunCli) -> None:
    pipe: Any = recipes()["stable-diffusion"].make()
    pipe.save_pretrained(tmp_path)
    done = run_cli_forked("explain", str(tmp_path), "--device", "cpu", "--dtype", "float32", "--size", "64x64")
    assert "host memory for loading" in done.stdout
    assert "mapped from the files" in done.stdout
    (tmp_path / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    done = run_cli_forked("explain", str(tmp_path), "--device", "cpu", "--json", "--size", "64x64")
    assert json.loads(done.stdout)["loading"] is None
