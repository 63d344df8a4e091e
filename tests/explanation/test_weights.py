"""The option `weights=` of `explain`, compared with the plan of the loaded pipeline."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import anyaccel
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.explanation.device_argument import find_device_target
from anyaccel.explanation.text import describe_explanation
from anyaccel.planning.memory import Forecast
from anyaccel.planning.options import WEIGHT_FORMATS
from anyaccel.runtime.call_request import read_call_request
from anyaccel.runtime.introspection import plain_class
from anyaccel.runtime.placement.memory_plan import forecast_call
from anyaccel.runtime.placement_state import find_placement
from tests.conftest import NEEDS_RECIPES
from tests.quantized_weights.quantizers import Model

pytestmark = NEEDS_RECIPES
SIDE = 16
FLUX = "black-forest-labs/FLUX.1-schnell"
MEASURED = Path(__file__).parents[2] / "benchmarks" / "results" / "quantized_cuda.json"
# Wide enough for weights to be most of the memory.
MODEL = Model(
    "flux",
    {
        "num_layers": 3,
        "num_single_layers": 3,
        "attention_head_dim": 64,
        "num_attention_heads": 8,
        "axes_dims_rope": (16, 24, 24),
    },
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flux")
    MODEL.make().save_pretrained(folder)
    return folder


def forecast_placed(pipe: Any) -> Forecast:
    placement = find_placement(pipe)
    assert placement is not None
    arguments = {"prompt": "a", "height": SIDE, "width": SIDE, "num_inference_steps": 2, "output_type": "pt"}
    return forecast_call(pipe, placement, read_call_request(pipe, plain_class(pipe).__call__, (), arguments))


# XPU is the only virtual accelerator with float8.
@pytest.mark.parametrize(("device", "formats"), [("mps", (None, *WEIGHT_FORMATS)), ("xpu", ("fp8",))])
def test_the_forecast_is_that_of_the_loaded_pipeline(device: str, formats: tuple[str | None, ...], saved: Path) -> None:
    def use(accelerator: VirtualAccelerator) -> list[tuple[Forecast, Forecast, tuple[Any, ...]]]:
        results = []
        for weights in formats:
            options = {"dtype": "bfloat16", "weights": weights}
            explained = anyaccel.explain(saved, accelerator.name, height=SIDE, width=SIDE, **options)  # type: ignore[arg-type]
            loaded: Any = anyaccel.DiffusionPipeline.from_pretrained(saved)
            placed = anyaccel.place(loaded, f"virtual:{accelerator.name}", **options)
            assert explained.forecast is not None
            decisions = tuple((plan.weights.value, plan.dequantized) for plan in (explained, placed.plan))
            results.append((explained.forecast, forecast_placed(placed), decisions))
        return results

    totals = {}
    for weights, (explained, loaded, decisions) in zip(formats, run_forked(device, use, memory="160MiB"), strict=True):
        assert dict(explained.components) == pytest.approx(dict(loaded.components), rel=0.02)
        assert explained.peak_bytes == pytest.approx(loaded.peak_bytes, rel=0.02)
        assert dict(explained.phases) == pytest.approx(dict(loaded.phases), rel=0.02)
        assert decisions[0] == decisions[1]
        assert dict(decisions[0][0]) == ({} if weights is None else {"transformer": weights})
        totals[weights] = sum(dict(explained.components).values())
    assert totals.get(None, 1e9) > 1.8 * totals.get("fp8", 0)
    assert totals.get("fp8", 1e9) > 1.6 * totals.get("nf4", 0)


def test_the_forecast_is_that_of_the_h200_measurement() -> None:
    rows = json.loads(MEASURED.read_text())["rows"]
    peaks = {row["format"]: row["anyaccel"]["peak_bytes"] for row in rows if row["case"] == "flux"}
    plan = anyaccel.explain(FLUX, "h200", height=1024, width=1024, dtype="bfloat16", weights="fp8")
    assert plan.forecast is not None
    assert plan.forecast.peak_bytes == pytest.approx(peaks["weights='fp8'"], rel=0.01)
    assert "the error is not measured, because the weights are not loaded" in plan.weights.reason


def test_all_formats_are_listed_if_the_weights_do_not_stay_on_the_device() -> None:
    plan = anyaccel.explain(FLUX, "cuda:24GiB", height=1024, width=1024)
    assert plan.forecast is not None
    assert plan.memory.value.residence == "component"
    options = {option.name: option for option in plan.forecast.offers}
    assert tuple(options) == WEIGHT_FORMATS
    explained = anyaccel.explain(FLUX, "cuda:24GiB", height=1024, width=1024, weights="nf4")
    assert explained.forecast is not None
    assert options["nf4"].weights_bytes == sum(size for _, size in explained.forecast.components)
    assert options["nf4"].peak_bytes == explained.forecast.peak_bytes
    assert options["nf4"].memory == str(explained.memory) == "everything resident"
    assert explained.forecast.offers == ()
    text = describe_explanation(plan, FLUX)
    assert next(line for line in text if line.startswith("  nf4 ")).split() == [
        "nf4", "10.7", "GiB", "13.2", "GiB", "everything", "resident",
    ]  # fmt: skip
    assert max(map(len, text)) <= 100 or any("https://" in line for line in text if len(line) > 100)
    keys = {"name", "weights_bytes", "peak_bytes", "memory", "fits"}
    assert [set(option) for option in plan.to_dict()["offers"]] == [keys] * 5


def test_formats_of_packages_that_are_not_installed(monkeypatch: pytest.MonkeyPatch, saved: Path) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    reserved = 2**30 - find_device_target("cuda:1GiB").capacity_bytes
    plan = anyaccel.explain(saved, f"cuda:{reserved / 2**20 + 10}MiB", height=SIDE, width=SIDE)
    assert plan.forecast is not None
    assert not plan.forecast.fits
    assert [option.name for option in plan.forecast.offers] == ["int8", "fp8", "nf4"]
    notes = [note for note in plan.forecast.notes if "gguf" in note]
    assert notes[0] == (
        "weights='gguf:Q8_0' requires the package gguf, so its memory is not predicted (pip install gguf)"
    )
    assert len(notes) == 2
    with pytest.raises(anyaccel.AnyaccelError, match="requires the package gguf") as caught:
        anyaccel.explain(saved, "mps:16GiB", weights="gguf:Q4_0")
    assert caught.value.hint == "pip install gguf"
    assert isinstance(caught.value, ImportError)


def test_formats_are_not_listed_if_everything_stays_on_the_device() -> None:
    plan = anyaccel.explain("embedded", "h200")
    assert plan.forecast is not None
    assert plan.forecast.offers == ()
    assert "quantized weights (--weights) are not needed: all weights stay on the device" in describe_explanation(
        plan, "embedded"
    )


@pytest.mark.long
def test_a_format_that_fits_is_suggested(saved: Path) -> None:
    options: dict[str, Any] = {"height": SIDE, "width": SIDE, "dtype": "bfloat16", "memory": "resident"}
    large = anyaccel.explain(saved, "cuda:1GiB", **options).forecast
    small = anyaccel.explain(saved, "cuda:1GiB", **options, weights="int8").forecast
    assert large is not None
    assert small is not None
    needed = (large.peak_bytes + small.peak_bytes) // 2
    target = find_device_target("cuda:1GiB")
    reserved = 2**30 - target.capacity_bytes
    plan = anyaccel.explain(saved, f"cuda:{(needed + reserved) / 2**20}MiB", **options)
    assert plan.forecast is not None
    assert not plan.forecast.fits
    assert [option.name for option in plan.forecast.offers if option.fits] == list(WEIGHT_FORMATS)
    assert "  --weights int8, which changes the image" in describe_explanation(plan, str(saved))
