"""Time estimates: counted operations, scaling with steps and throughput, and the cases without an estimate."""

import json
import warnings
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import anyaccel
from anyaccel.explanation.call_arguments import CallSize
from anyaccel.explanation.explain import trace_call
from anyaccel.explanation.text import describe_explanation
from anyaccel.planning import time_estimate
from anyaccel.planning.time_estimate import TimeEstimate, count_work
from anyaccel.recipes import recipes
from tests.conftest import ROOT

LIBRARY: Any = diffusers
RESULT = ROOT / "benchmarks" / "results" / "time_estimate_cuda.json"


def estimate(device: str, **arguments: object) -> TimeEstimate | None:
    plan = anyaccel.explain("embedded", device, **arguments)  # type: ignore[arg-type]
    assert plan.forecast is not None
    return plan.forecast.time


def test_operations_are_those_of_a_real_call(tmp_path: Path) -> None:
    recipe = recipes()["stable-diffusion"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe = recipe.make()
        pipe.save_pretrained(tmp_path)  # type: ignore[attr-defined]
        call = {**recipe.call(), "num_inference_steps": 2, "guidance_scale": 5.0, "output_type": "pt"}
        pipe.set_progress_bar_config(disable=True)  # type: ignore[attr-defined]
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
            pipe(**call)  # type: ignore[operator]
    size = CallSize((call["width"], call["height"]), arguments=(("guidance_scale", 5.0),))
    work = count_work(trace_call(str(tmp_path), "h200", size), 2)
    assert work.flops == pytest.approx(counter.get_total_flops(), rel=0.01)
    assert work.kernels > 100
    assert work.traffic_bytes > 0


def test_time_scales_with_steps_and_throughput() -> None:
    few, many = estimate("h200", steps=10), estimate("h200", steps=100)
    assert few is not None
    assert many is not None
    assert (few.steps, many.steps) == (10, 100)
    assert 5 < many.seconds / few.seconds < 10, "the text encoder and the decoder run once"
    other = estimate("rtx4090", steps=10)
    assert other is not None
    assert other.flops == few.flops
    assert few.seconds < other.seconds < few.seconds * 989.5 / 165.15, "the kernels of a small model take equal times"


@pytest.mark.parametrize(
    ("scheduler", "loops"),
    [
        (LIBRARY.EulerDiscreteScheduler(), 20),
        (LIBRARY.PNDMScheduler(skip_prk_steps=True), 21),
        (LIBRARY.HeunDiscreteScheduler(), 39),
    ],
)
def test_some_schedulers_call_the_denoiser_more_often(scheduler: Any, loops: int, tmp_path: Path) -> None:
    recipe = recipes()["stable-diffusion"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe: Any = recipe.make()
        pipe.scheduler = scheduler
        pipe.save_pretrained(tmp_path)
    call = recipe.call()
    footprint = trace_call(str(tmp_path), "h200", CallSize((call["width"], call["height"])))
    calls = sum(call.phase == "denoise" for call in footprint.model_calls)
    assert calls * footprint.count_loops(20) == pytest.approx(loops)


def test_moved_weights_are_listed() -> None:
    plan = anyaccel.explain("embedded", "rtx4090", steps=20, memory="component")
    assert plan.forecast is not None
    assert plan.forecast.time is not None
    weights = sum(size for _, size in plan.forecast.components)
    assert 0.5 * weights < plan.forecast.time.moved_bytes <= weights
    assert "plus the time to move" in " ".join(describe_explanation(plan, "embedded"))
    resident = estimate("rtx4090", steps=20)
    assert resident is not None
    assert resident.moved_bytes == 0


@pytest.mark.parametrize(
    ("device", "arguments"),
    [
        ("rtx4090-laptop", {}),  # no published throughput
        ("cuda:24GiB", {}),  # no product
        ("h200", {"dtype": "float32"}),
    ],
)
def test_without_figures_there_is_no_estimate(device: str, arguments: dict[str, str]) -> None:
    assert estimate(device, **arguments) is None


def test_estimate_is_marked_with_its_error() -> None:
    plan = anyaccel.explain("embedded", "rtx4090", steps=20)
    text = " ".join(describe_explanation(plan, "embedded"))
    assert "estimated time for one image: " in text
    assert "with 20 steps" in text
    assert "on an H200, measured times are 0.67 to 1.9 times as long as estimated" in " ".join(text.split())
    assert plan.forecast is not None
    as_json = plan.forecast.to_dict()["time_estimate"]
    assert as_json["least_s"] < as_json["seconds"] < as_json["most_s"]


def test_constants_are_those_of_the_benchmark() -> None:
    result = json.loads(RESULT.read_text())
    assert result["utilization"] == time_estimate.UTILIZATION
    assert result["seconds_per_kernel"] == pytest.approx(time_estimate.SECONDS_PER_KERNEL)
    ratios = result["measured_over_estimated"]
    assert (ratios["least"], ratios["most"]) == (time_estimate.SMALLEST_RATIO, time_estimate.LARGEST_RATIO)
    assert len(result["rows"]) >= 8
    published = [row["measured_over_estimated"] for row in result["published"]]
    assert len(published) >= 7
    assert ratios["least"] < min(published) <= max(published) < ratios["most"], "times on other products"
