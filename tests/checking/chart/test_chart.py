"""Chart: tiny pipelines on virtual devices, in plain diffusers and placed, compared with the CPU's image.

These tests run one recipe in 32 placed and another in plain diffusers, each on one device. `make chart`
runs all recipes on all devices.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from anyaccel.checking.chart.chart import (
    Attempt,
    Chart,
    ChartCell,
    ChartRow,
    CodeLine,
    LimitFinding,
    find_families,
    make_chart,
)
from anyaccel.checking.chart.chart_json import as_document, read_chart, write_chart
from anyaccel.checking.chart.known_failures import find_reason
from anyaccel.checking.chart.markdown import write_markdown
from anyaccel.checking.check import find_devices
from anyaccel.checking.run import CheckMode, run_on_cpu, run_on_device
from anyaccel.cli.chart import _lock_checkpoint, _run
from anyaccel.cli.progress import Display
from anyaccel.errors import AnyaccelError
from anyaccel.recipes import Recipe, recipes
from tests.conftest import NEEDS_RECIPES, SharedCache

pytestmark = pytest.mark.usefixtures("pipelines_imported")
DEVICES = find_devices("all")
_UNINITIALIZED = "its attention reads uninitialized memory, which is NaN on MPS (diffusers #14438)"
# Recipes that do not work when they are placed, and their devices.
_GUIDANCE_ON_CPU = ("semantic-guidance", "ledits-pp-stable-diffusion", "ledits-pp-stable-diffusion-xl")
FAILS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("attend-and-excite", *_GUIDANCE_ON_CPU), tuple(DEVICES)),
    **dict.fromkeys(("unclip", "unclip-image-variation"), ("mps",)),
    **dict.fromkeys(("motif-video", "motif-video-image-to-video"), ("mps", "npu")),
    "ltx-2-5-modular": tuple(device for device in DEVICES if device != "xpu"),
}
NO_FLEX_ATTENTION = ("mlu", "neuron", "npu")
PLAIN_DIFFERS = {
    ("easy-animate-inpaint", "*"): "passes a CPU generator to a device tensor, which torch rejects on every device",
    ("attend-and-excite", "*"): "needs gradients through attention, which virtual devices do not support",
    ("wuerstchen-prior", "mps"): _UNINITIALIZED,
    ("wuerstchen-combined", "mps"): _UNINITIALIZED,
    ("stable-diffusion-self-attention-guidance", "mps"): _UNINITIALIZED,
    **{("ltx-2-5-modular", device): "torch rejects flex attention on this device" for device in NO_FLEX_ATTENTION},
    ("unclip", "mps"): "diffusers selects another interpolation mode on mps",
    ("unclip-image-variation", "mps"): "diffusers selects another interpolation mode on mps",
}
"""Recipes that fail or differ from the CPU in plain diffusers, with the reason. A match is an error too."""


def find_cpu_images(chosen: Sequence[Recipe], shared_cache: SharedCache) -> dict[str, Any]:
    """Return the cached images, which the recipe tests cache too; compute missing images in one process."""
    images = {recipe.name: shared_cache.find(f"image-{recipe.name}") for recipe in chosen}
    missing = [recipe for recipe in chosen if images[recipe.name] is None]
    computed = run_on_cpu(missing) if missing else {}
    for name, image in computed.items():
        shared_cache.keep(f"image-{name}", image)
    return images | computed


def test_there_are_six_virtual_devices() -> None:
    assert sorted(DEVICES) == ["hpu", "mlu", "mps", "neuron", "npu", "xpu"]
    assert len({recipe.pipeline for recipe in recipes().values()}) >= 200


@pytest.mark.long
@NEEDS_RECIPES
@pytest.mark.parametrize(("index", "device"), list(enumerate(DEVICES)))
def test_pipelines_work_placed_on_a_device(index: int, device: str, shared_cache: SharedCache) -> None:
    chosen = list(recipes().values())[(index + 3) % len(DEVICES) :: 32 * len(DEVICES)]
    expected = find_cpu_images(chosen, shared_cache)
    reports = run_on_device(device, chosen, expected, [CheckMode(placed=True, strict=True)])
    for recipe, report in zip(chosen, reports, strict=True):
        fails = device in FAILS.get(recipe.name, ())
        assert (report.state == "works") != fails, (recipe.name, report.state, report.error)
        assert bool(find_reason(recipe.name)) or not fails


@pytest.mark.long
@NEEDS_RECIPES
@pytest.mark.parametrize(("index", "device"), list(enumerate(DEVICES)))
def test_plain_pipelines_generate_the_image_of_the_cpu(index: int, device: str, shared_cache: SharedCache) -> None:
    chosen = list(recipes().values())[index :: 32 * len(DEVICES)]
    reports = run_on_device(device, chosen, find_cpu_images(chosen, shared_cache), [CheckMode(placed=False)])
    for recipe, report in zip(chosen, reports, strict=True):
        matches = report.max_difference is not None and report.max_difference <= 1e-4
        expected_to_differ = (recipe.name, "*") in PLAIN_DIFFERS or (recipe.name, device) in PLAIN_DIFFERS
        assert matches != expected_to_differ, (recipe.name, report.max_difference, report.error)


@NEEDS_RECIPES
def test_a_chart_is_computed_written_and_read(tmp_path: Path) -> None:
    progress: list[tuple[int, int, str]] = []
    chosen = find_families(["pixart"], recipes().values())
    lines = tuple(make_chart(chosen, ["mps", "neuron"], on_progress=lambda *event: progress.append(event)))
    chart = Chart(("mps", "neuron"), lines, 1.0, {"date": "2026-01-01", "versions": {"torch": "2"}})
    assert {line.recipe for line in lines} == {"pixart-alpha", "pixart-sigma"}
    assert progress == [(4, 4, "pixart")]
    assert all(cell.placed.state == "works" for line in lines for cell in line.cells)
    sigma = next(line for line in lines if line.recipe == "pixart-sigma").cell("neuron")
    assert sigma.plain.state == "stops"
    assert any(
        finding.limit == "data_dependent_shapes" and finding.effect == "error" for finding in sigma.plain.findings
    )
    write_chart(chart, tmp_path / "chart.json")
    read = read_chart(tmp_path / "chart.json")
    assert as_document(read) == as_document(chart)
    assert json.loads((tmp_path / "chart.json").read_text())["evidence"] == "virtual"


def make_small_chart() -> Chart:
    site = CodeLine("diffusers/x.py", 3, "torch.arange(3, dtype=torch.float64)")
    stops = Attempt(
        "stops", "LimitError: no float64", None, None, (LimitFinding("dtypes.float64", "error", site, 2, 0),)
    )
    works = Attempt("works", "", 1e-7, 0.0)
    lines = (
        ChartRow("flux", "FluxPipeline", "flux", (ChartCell("mps", stops, works),)),
        ChartRow("unclip", "UnCLIPPipeline", "unclip", (ChartCell("mps", works, Attempt("wrong", "", 0.3, 0.0)),)),
    )
    return Chart(("mps",), lines, 1.0, {"versions": {"torch": "2"}})


def test_the_markdown_has_every_pipeline_with_marks_and_badges() -> None:
    page = write_markdown(make_small_chart())
    assert "| flux `FluxPipeline` | ✗ → ✓ | ![mps: works (virtual)](badges/mps.svg) |" in page
    assert "| unclip `UnCLIPPipeline` | ✓ → ≠ |  |" in page
    assert "**unclip** on mps (wrong): diffusers selects another interpolation mode" in page
    assert "**virtual**" in page


def test_an_unknown_family_and_an_invalid_chart_file_raise(tmp_path: Path) -> None:
    with pytest.raises(AnyaccelError, match="fluxx"):
        find_families(["fluxx"], recipes().values())
    (tmp_path / "chart.json").write_text("{}")
    with pytest.raises(AnyaccelError, match="as a chart"):
        read_chart(tmp_path / "chart.json")


@NEEDS_RECIPES
def test_a_pipeline_that_kills_its_process_does_not_affect_others() -> None:
    import os
    from dataclasses import replace

    parent = os.getpid()

    def die() -> dict[str, object]:
        if os.getpid() != parent:
            os._exit(9)
        return {}

    good = recipes()["pixart-alpha"]
    bad = replace(good, name="bad", call=die)
    from anyaccel.checking.chart import chart

    expected = run_on_cpu([good])
    cells = chart._run_guarded("mps", [bad, good], {**expected, "bad": expected["pixart-alpha"]})
    assert [cell.placed.state for cell in cells] == ["stops", "works"]
    assert "exited with status 9" in cells[0].placed.error


def test_two_charts_cannot_write_the_same_file(tmp_path: Path) -> None:
    with _lock_checkpoint(tmp_path / "chart.json"), pytest.raises(AnyaccelError, match="another process"):  # noqa: SIM117
        with _lock_checkpoint(tmp_path / "chart.json"):
            pass
    with _lock_checkpoint(tmp_path / "chart.json"):
        pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_chart_releases_its_file(tmp_path: Path, number: int) -> None:
    keep = tmp_path / "chart.json"
    program = "import sys, time, pathlib; from anyaccel.cli.chart import _lock_checkpoint\n"
    program += "with _lock_checkpoint(pathlib.Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", program, str(keep)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(AnyaccelError, match="another process is saving a chart"):
            _lock_checkpoint(keep)
        other.send_signal(number)
    with _lock_checkpoint(keep):
        pass


@NEEDS_RECIPES
def test_rows_of_other_pipelines_stay_in_the_file(tmp_path: Path) -> None:
    for family in ("dit", "pixart"):
        chart = _run(find_families([family], recipes().values()), ["xpu"], tmp_path / "chart.json", 1, Display())
        assert {row.family for row in chart.rows} == {find_families([family], recipes().values())[0].family}
    recipe_names = {row.recipe for row in read_chart(tmp_path / "chart.json").rows}
    assert recipe_names == {"dit", "pixart-alpha", "pixart-sigma"}
