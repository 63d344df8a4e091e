"""The chart: every tiny pipeline on a virtual device, in plain diffusers and placed, against the CPU's picture.

Here an eighth of the recipes run placed, each on one of the devices, and an eighth plain; `make chart` runs all,
everywhere.
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
from anyaccel.checking.chart.chart_file import as_document, read_chart, write_chart
from anyaccel.checking.chart.known_failures import find_reason
from anyaccel.checking.chart.markdown import write_markdown
from anyaccel.checking.check import find_devices
from anyaccel.checking.run import CheckMode, run_on_device, run_on_host
from anyaccel.cli.chart import _lock_checkpoint, _run
from anyaccel.cli.progress import Display
from anyaccel.errors import AnyaccelError
from anyaccel.recipes import Recipe, recipes
from tests.conftest import NEEDS_RECIPES, Kept

pytestmark = pytest.mark.usefixtures("pipelines_imported")
DEVICES = find_devices("all")
_UNWRITTEN = "its attention reads memory that was never written, which MPS lets through as NaN (diffusers #14438)"
NOWHERE = {"attend-and-excite", "semantic-guidance", "score-sde-ve"}
ELSEWHERE_THAN_MPS = {"unclip", "unclip-image-variation"}
PLAIN_DIFFERS = {
    ("easy-animate-inpaint", "*"): "hands the host's generator to a draw on the device, which torch refuses everywhere",
    ("attend-and-excite", "*"): "needs gradients, which virtual devices do not give through attention",
    ("wuerstchen-prior", "mps"): _UNWRITTEN,
    ("wuerstchen-combined", "mps"): _UNWRITTEN,
    ("stable-diffusion-self-attention-guidance", "mps"): _UNWRITTEN,
    ("unclip", "mps"): "diffusers itself enlarges the picture in another way on mps",
    ("unclip-image-variation", "mps"): "diffusers itself enlarges the picture in another way on mps",
}
"""What does not give the CPU's picture in plain diffusers, and why; one that does after all is a failure too."""


def find_pictures_of_the_cpu(chosen: Sequence[Recipe], kept: Kept) -> dict[str, Any]:
    """Those that were made already, here or in the tests of the recipes, and the others, which are made in one go."""
    pictures = {recipe.name: kept.find(f"picture-{recipe.name}") for recipe in chosen}
    missing = [recipe for recipe in chosen if pictures[recipe.name] is None]
    made = run_on_host(missing) if missing else {}
    for name, picture in made.items():
        kept.keep(f"picture-{name}", picture)
    return pictures | made


def test_the_six_devices() -> None:
    assert sorted(DEVICES) == ["hpu", "mlu", "mps", "neuron", "npu", "xpu"]
    assert len({recipe.pipeline for recipe in recipes().values()}) >= 200


@pytest.mark.long
@NEEDS_RECIPES
@pytest.mark.parametrize(("turn", "device"), list(enumerate(DEVICES)))
def test_pipelines_work_placed_on_a_device(turn: int, device: str, kept: Kept) -> None:
    chosen = list(recipes().values())[(turn + 3) % len(DEVICES) :: 8 * len(DEVICES)]
    expected = find_pictures_of_the_cpu(chosen, kept)
    reports = run_on_device(device, chosen, expected, [CheckMode(placed=True, strict=True)])
    for recipe, report in zip(chosen, reports, strict=True):
        known = recipe.name in NOWHERE or (recipe.name in ELSEWHERE_THAN_MPS and device == "mps")
        assert (report.state == "works") != known, (recipe.name, report.state, report.error)
        assert bool(find_reason(recipe.name)) or not known


@pytest.mark.long
@NEEDS_RECIPES
@pytest.mark.parametrize(("turn", "device"), list(enumerate(DEVICES)))
def test_plain_pipelines_give_the_picture_of_the_cpu(turn: int, device: str, kept: Kept) -> None:
    chosen = list(recipes().values())[turn :: 8 * len(DEVICES)]
    reports = run_on_device(device, chosen, find_pictures_of_the_cpu(chosen, kept), [CheckMode(placed=False)])
    for recipe, report in zip(chosen, reports, strict=True):
        same = report.max_difference is not None and report.max_difference <= 1e-4
        excused = (recipe.name, "*") in PLAIN_DIFFERS or (recipe.name, device) in PLAIN_DIFFERS
        assert same != excused, (recipe.name, report.max_difference, report.error)


@NEEDS_RECIPES
def test_a_chart_is_made_kept_and_read(tmp_path: Path) -> None:
    told: list[tuple[int, int, str]] = []
    chosen = find_families(["pixart"], recipes().values())
    lines = tuple(make_chart(chosen, ["mps", "neuron"], told=lambda *what: told.append(what)))
    chart = Chart(("mps", "neuron"), lines, 1.0, {"date": "2026-01-01", "versions": {"torch": "2"}})
    assert {line.recipe for line in lines} == {"pixart-alpha", "pixart-sigma"}
    assert told == [(4, 4, "pixart")]
    assert all(cell.placed.state == "works" for line in lines for cell in line.cells)
    sigma = next(line for line in lines if line.recipe == "pixart-sigma").cell("neuron")
    assert sigma.plain.state == "stops"
    assert any(found.limit == "data_dependent_shapes" and found.effect == "error" for found in sigma.plain.found)
    write_chart(chart, tmp_path / "chart.json")
    kept = read_chart(tmp_path / "chart.json")
    assert as_document(kept) == as_document(chart)
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


def test_the_markdown_has_every_pipeline_its_marks_and_badges() -> None:
    page = write_markdown(make_small_chart())
    assert "| flux `FluxPipeline` | ✗ → ✓ | ![mps: works (virtual)](badges/mps.svg) |" in page
    assert "| unclip `UnCLIPPipeline` | ✓ → ≠ |  |" in page
    assert "**unclip** on mps (wrong): diffusers itself enlarges" in page
    assert "**virtual**" in page


def test_what_is_no_family_and_what_is_no_chart_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AnyaccelError, match="fluxx"):
        find_families(["fluxx"], recipes().values())
    (tmp_path / "chart.json").write_text("{}")
    with pytest.raises(AnyaccelError, match="no chart"):
        read_chart(tmp_path / "chart.json")


@NEEDS_RECIPES
def test_a_pipeline_that_kills_its_process_spoils_no_other() -> None:
    import os
    from dataclasses import replace

    host = os.getpid()

    def die() -> dict[str, object]:
        if os.getpid() != host:
            os._exit(9)
        return {}

    good = recipes()["pixart-alpha"]
    bad = replace(good, name="bad", call=die)
    from anyaccel.checking.chart import chart

    expected = run_on_host([good])
    cells = chart._run_guarded("mps", [bad, good], {**expected, "bad": expected["pixart-alpha"]})
    assert [cell.placed.state for cell in cells] == ["stops", "works"]
    assert "died with status 9" in cells[0].placed.error


def test_one_chart_at_a_time_is_kept_in_a_file(tmp_path: Path) -> None:
    with _lock_checkpoint(tmp_path / "chart.json"), pytest.raises(AnyaccelError, match="another chart"):  # noqa: SIM117
        with _lock_checkpoint(tmp_path / "chart.json"):
            pass
    with _lock_checkpoint(tmp_path / "chart.json"):
        pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_chart_that_was_ended_does_not_keep_the_next_one_from_its_file(tmp_path: Path, number: int) -> None:
    keep = tmp_path / "chart.json"
    program = "import sys, time, pathlib; from anyaccel.cli.chart import _lock_checkpoint\n"
    program += "with _lock_checkpoint(pathlib.Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", program, str(keep)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(AnyaccelError, match="another chart"):
            _lock_checkpoint(keep)
        other.send_signal(number)
    with _lock_checkpoint(keep):
        pass


@NEEDS_RECIPES
def test_what_is_kept_of_other_pipelines_stays(tmp_path: Path) -> None:
    for family in ("dit", "pixart"):
        chart = _run(find_families([family], recipes().values()), ["xpu"], tmp_path / "chart.json", 1, Display())
        assert {line.family for line in chart.lines} == {find_families([family], recipes().values())[0].family}
    kept = {line.recipe for line in read_chart(tmp_path / "chart.json").lines}
    assert kept == {"dit", "pixart-alpha", "pixart-sigma"}
