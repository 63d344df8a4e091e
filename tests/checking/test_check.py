"""`anyaccel check`: faults are reported at their lines, on the devices that they affect."""

import json
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
from tests.conftest import RunCli

BAD = Path(__file__).with_name("bad_pipeline.py")
EFFECTS = {
    "float64": {"mps": "error", "neuron": "error", "npu": "error", "hpu": "narrowed", "mlu": "narrowed"},
    "random": {"neuron": "error"},
    "shape": {"neuron": "error", "hpu": "slow"},
    "int64": dict.fromkeys(["mps", "neuron", "npu", "hpu", "mlu"], "narrowed"),
    "size": {"mps": "error"},
    "round trip": dict.fromkeys(["mps", "neuron", "npu", "hpu", "mlu", "xpu"], "slow"),
}
"""Effect of each fault by device, from the sources of the sheets. Other devices are not affected."""


def line_of(fault: str) -> int:
    return next(at for at, line in enumerate(BAD.read_text().splitlines(), 1) if f"# fault: {fault}" in line)


@pytest.fixture(scope="module")
def plain() -> Report:
    return check(make(), "all", plain=True)


@pytest.mark.parametrize("device", find_devices("all"))
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_reported_at_its_line_on_affected_devices_only(plain: Report, device: str, fault: str) -> None:
    violations = [violation for violation in plain.devices[device].violations if violation.limit == FAULTS[fault]]
    at_line = [
        violation
        for violation in violations
        if violation.file.endswith("bad_pipeline.py") and violation.line == line_of(fault)
    ]
    expected = EFFECTS[fault].get(device)
    if expected is None:
        assert at_line == []
        return
    limit = anyaccel.sheet(device).limits(Limit)[FAULTS[fault]]
    assert (at_line[0].effect, at_line[0].source, at_line[0].hint) == (expected, limit.source, limit.hint)
    assert f"# fault: {fault}" in at_line[0].code


def test_no_other_line_is_reported_as_an_error(plain: Report) -> None:
    """The only exception is the line that uses the float64 table from a faulty line."""
    faults = {line_of(fault) for fault in FAULTS}
    for report in plain.devices.values():
        others = {violation.code for violation in report.of("error") if violation.line not in faults}
        assert others <= {"angle = (table * 0.1).to(latents.dtype)"}


def test_round_trips_in_a_model_are_counted_per_step(plain: Report) -> None:
    for report in plain.devices.values():
        trips = [violation for violation in report.violations if violation.line == line_of("round trip")]
        assert trips[0].count == 2
        assert report.host_round_trips_per_step is not None
        assert report.host_round_trips_per_step >= 1


def test_the_check_fails_if_a_line_hits_an_error(plain: Report) -> None:
    assert not plain.devices["neuron"].runs
    assert not plain.passes
    assert plain.devices["neuron"].of("error")


def test_strict_raises_where_the_device_would() -> None:
    report = check(make(), "neuron", plain=True, strict=True).devices["neuron"]
    assert not report.finished
    assert report.error.startswith("Limit")


def test_a_placed_recipe_passes_and_has_json() -> None:
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


@pytest.mark.parametrize("target", ["nonsense", "tests.checker.nowhere:make", "tests.checking.bad_pipeline:nothing"])
def test_an_unknown_target_raises_with_a_hint(target: str) -> None:
    with pytest.raises(AnyaccelError) as caught:
        check(target, "mps")
    assert caught.value.hint


def test_unknown_devices_raise() -> None:
    assert "mps" in find_devices("all")
    with pytest.raises(AnyaccelError, match="quantum"):
        find_devices(["mps", "quantum"])


def test_the_command_exits_with_1_if_the_check_fails(run_cli_forked: RunCli) -> None:
    done = run_cli_forked("check", "tests.checking.bad_pipeline:make", "-d", "neuron", "--plain")
    assert done.returncode == 1, done.stderr
    assert "neuron (virtual, plain diffusers): would fail: " in done.stdout
    assert f"bad_pipeline.py:{line_of('float64')}" in done.stdout


@pytest.mark.long
def test_the_check_runs_in_a_new_process_if_torch_has_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    report = check(make(), "neuron", plain=True).devices["neuron"]
    assert line_of("float64") in [violation.line for violation in report.of("error")]


def test_a_modular_pipeline_is_checked_with_its_own_blocks() -> None:
    from tests.checking import modular_pipeline

    source = Path(modular_pipeline.__file__).read_text().splitlines()
    fault = next(at for at, line in enumerate(source, 1) if "# fault: float64" in line)
    report = check("tests.checking.modular_pipeline:make", ["mps", "hpu"], plain=True)
    assert report.pipeline == "StableDiffusionXLModularPipeline"
    for device, effect in (("mps", "error"), ("hpu", "narrowed")):
        violations = [
            violation
            for violation in report.devices[device].violations
            if violation.file.endswith("modular_pipeline.py")
        ]
        reported = [(violation.line, violation.limit, violation.effect) for violation in violations]
        assert (fault, "dtypes.float64", effect) in reported
        assert report.devices[device].max_difference == pytest.approx(0, abs=1e-3)


def test_a_placed_modular_pipeline_passes() -> None:
    assert check("tests.checking.modular_pipeline:make", "mps").passes


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("make_exit", r"make_exit raised an error: SystemExit: 0 \(.*failing.py:13\)"),
        ("make_raise", r"make_raise raised an error: ValueError: in make \(.*failing.py:18\)"),
        ("make_that_fails_on_the_cpu", r"fails on the CPU: KeyError: 'boom' \(.*failing.py:23\)"),
    ],
)
def test_an_error_in_user_code_is_reported_with_its_line(function: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check(f"tests.checking.failing:{function}", "mps")


def test_a_device_process_that_dies_does_not_affect_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from anyaccel.checking import run

    run_on_device = run.run_on_device

    def die_on_mps(device: str, *arguments: Any) -> Any:
        if device == "mps":
            raise VirtualDeviceError("its process died with status 7", hint="-")
        return run_on_device(device, *arguments)

    monkeypatch.setattr(run, "run_on_device", die_on_mps)
    report = check(make(), ["mps", "xpu"], plain=True)
    assert report.devices["xpu"].finished
    assert not report.devices["mps"].finished
    assert "status 7" in report.devices["mps"].error


def test_a_component_without_a_config_is_noted(tmp_path: Path) -> None:
    import shutil

    from anyaccel.explanation.known_models import find_bundled_configs

    described = find_bundled_configs("stabilityai/sdxl-turbo")
    assert described is not None
    shutil.copytree(described, tmp_path / "model")
    shutil.rmtree(tmp_path / "model" / "unet")
    assert any("unet: no config found" in note for note in make_small_model(tmp_path / "model").notes)
