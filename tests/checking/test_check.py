"""`anyaccel check`: faults named at their own lines, where they are faults and nowhere else."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import anyaccel
from anyaccel.backends.claim import Limit
from anyaccel.checking.check import check, find_devices
from anyaccel.checking.report import Report
from anyaccel.checking.small_model import make_small_model
from anyaccel.errors import AnyaccelError, UsageError, VirtualDeviceError
from tests.checking.bad_pipeline import FAULTS, make
from tests.conftest import ROOT

BAD = Path(__file__).with_name("bad_pipeline.py")
EFFECTS = {
    "float64": {"mps": "error", "neuron": "error", "npu": "error", "hpu": "narrowed", "mlu": "narrowed"},
    "random": {"neuron": "error"},
    "shape": {"neuron": "error", "hpu": "slow"},
    "int64": dict.fromkeys(["mps", "neuron", "npu", "hpu", "mlu"], "narrowed"),
    "size": {"mps": "error"},
    "round trip": dict.fromkeys(["mps", "neuron", "npu", "hpu", "mlu", "xpu"], "slow"),
}
"""What each fault does, by device, as the sheets' sources have it; on the devices that are not named it is none."""


def line_of(fault: str) -> int:
    return next(at for at, line in enumerate(BAD.read_text().splitlines(), 1) if f"# fault: {fault}" in line)


@pytest.fixture(scope="module")
def plain() -> Report:
    return check(make(), "all", plain=True)


@pytest.mark.parametrize("device", find_devices("all"))
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_at_its_line_where_it_is_one(plain: Report, device: str, fault: str) -> None:
    found = [one for one in plain.devices[device].violations if one.limit == FAULTS[fault]]
    here = [one for one in found if one.file.endswith("bad_pipeline.py") and one.line == line_of(fault)]
    expected = EFFECTS[fault].get(device)
    if expected is None:
        assert here == []
        return
    limit = anyaccel.sheet(device).limits(Limit)[FAULTS[fault]]
    assert (here[0].effect, here[0].source, here[0].hint) == (expected, limit.source, limit.hint)
    assert f"# fault: {fault}" in here[0].code


def test_no_other_line_of_it_is_accused_of_an_error(plain: Report) -> None:
    """But for the one that goes on with what a fault made: the table in float64."""
    faults = {line_of(fault) for fault in FAULTS}
    for report in plain.devices.values():
        others = {one.code for one in report.of("error") if one.line not in faults}
        assert others <= {"angle = (table * 0.1).to(latents.dtype)"}


def test_a_round_trip_a_layer_is_counted_a_step(plain: Report) -> None:
    for report in plain.devices.values():
        trips = [one for one in report.violations if one.line == line_of("round trip")]
        assert trips[0].count == 2
        assert report.host_round_trips_per_step is not None
        assert report.host_round_trips_per_step >= 1


def test_where_an_error_is_met_the_answer_is_no(plain: Report) -> None:
    assert not plain.devices["neuron"].runs
    assert not plain.passes
    assert plain.devices["neuron"].of("error")


def test_strict_stops_where_the_device_would() -> None:
    report = check(make(), "neuron", plain=True, strict=True).devices["neuron"]
    assert not report.finished
    assert report.error.startswith("Limit")


def test_a_recipe_passes_placed_and_the_json_says_so() -> None:
    report = check("stable-diffusion", ["neuron"])
    document = json.loads(report.to_json())["devices"]["neuron"]
    assert document["passes"] is True
    assert document["runs"] is True
    assert document["virtual"] is True
    assert document["max_difference"] <= 1e-3
    assert document["host_round_trips_per_step"] == 0
    assert document["graphs"] is None


@pytest.mark.usefixtures("compiler_imported")
def test_compiling_counts_the_graphs() -> None:
    graphs = check("stable-diffusion", ["neuron"], compile=True).devices["neuron"].graphs
    assert graphs is not None
    assert graphs.compiled == 1
    assert graphs.breaks == ()


@pytest.mark.parametrize("asked", ["nonsense", "tests.checker.nowhere:make", "tests.checking.bad_pipeline:nothing"])
def test_what_is_no_subject_is_said_with_a_hint(asked: str) -> None:
    with pytest.raises(AnyaccelError) as caught:
        check(asked, "mps")
    assert caught.value.hint


def test_unknown_devices_are_refused() -> None:
    assert "mps" in find_devices("all")
    with pytest.raises(AnyaccelError, match="quantum"):
        find_devices(["mps", "quantum"])


@pytest.mark.long
def test_the_command_ends_with_one_where_the_answer_is_no() -> None:
    command = [Path(sys.executable).parent / "anyaccel", "check", "tests.checking.bad_pipeline:make", "-d", "neuron"]
    done = subprocess.run([*map(str, command), "--plain"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "neuron (virtual, plain diffusers): does not run" in done.stdout
    assert f"bad_pipeline.py:{line_of('float64')}" in done.stdout


@pytest.mark.long
def test_where_threads_run_a_fresh_process_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    report = check(make(), "neuron", plain=True).devices["neuron"]
    assert line_of("float64") in [one.line for one in report.of("error")]


def test_a_modular_pipeline_is_checked_with_its_own_blocks() -> None:
    from tests.checking import modular_pipeline

    source = Path(modular_pipeline.__file__).read_text().splitlines()
    fault = next(at for at, line in enumerate(source, 1) if "# fault: float64" in line)
    report = check("tests.checking.modular_pipeline:make", ["mps", "hpu"], plain=True)
    assert report.pipeline == "StableDiffusionXLModularPipeline"
    for device, effect in (("mps", "error"), ("hpu", "narrowed")):
        found = [one for one in report.devices[device].violations if one.file.endswith("modular_pipeline.py")]
        assert (fault, "dtypes.float64", effect) in [(one.line, one.limit, one.effect) for one in found]
        assert report.devices[device].max_difference == pytest.approx(0, abs=1e-3)


def test_a_modular_pipeline_passes_where_it_is_placed() -> None:
    assert check("tests.checking.modular_pipeline:make", "mps").passes


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("make_exit", r"make_exit fails: SystemExit: 0 \(.*failing.py:13\)"),
        ("make_raise", r"make_raise fails: ValueError: in make \(.*failing.py:18\)"),
        ("make_that_fails_on_the_cpu", r"fails on the CPU already: KeyError: 'boom' \(.*failing.py:23\)"),
    ],
)
def test_a_fault_of_the_users_is_told_with_its_line(function: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check(f"tests.checking.failing:{function}", "mps")


def test_a_device_whose_process_dies_spoils_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    from anyaccel.checking import run

    whole = run.run_on_device

    def die_on_mps(device: str, *rest: Any) -> Any:
        if device == "mps":
            raise VirtualDeviceError("its process died with status 7", hint="-")
        return whole(device, *rest)

    monkeypatch.setattr(run, "run_on_device", die_on_mps)
    report = check(make(), ["mps", "xpu"], plain=True)
    assert report.devices["xpu"].finished
    assert not report.devices["mps"].finished
    assert "status 7" in report.devices["mps"].error


def test_a_component_without_a_config_is_noted(tmp_path: Path) -> None:
    import shutil

    from anyaccel.explanation.known_models import find_description

    described = find_description("stabilityai/sdxl-turbo")
    assert described is not None
    shutil.copytree(described, tmp_path / "model")
    shutil.rmtree(tmp_path / "model" / "unet")
    assert any("unet: there is no config of it" in note for note in make_small_model(tmp_path / "model").notes)
