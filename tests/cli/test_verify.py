"""`anyaccel devices NAME --verify`, as a user runs it."""

import json
from pathlib import Path

import pytest

from anyaccel.backends.evidence_files import read_verification
from tests.conftest import NEEDS_RECIPES, RunCli


@pytest.mark.slow
@NEEDS_RECIPES
def test_cpu_agrees_with_its_sheet(run_cli_forked: RunCli, tmp_path: Path) -> None:
    file = tmp_path / "evidence.json"
    done = run_cli_forked(
        "devices", "cpu", "--verify", "--quick", "--pipelines", "ddpm", "--jobs", "1", "--output", str(file),
        "--signed-off-by", "A. Name", HOME=str(tmp_path),
    )  # fmt: skip
    verification = read_verification(file.read_text(), file.name)
    assert done.returncode == (0 if verification.holds else 1), done.stderr
    assert not verification.virtual
    assert verification.signed_off_by == "A. Name"
    assert [(finding.recipe, finding.right) for finding in verification.pipelines] == [("ddpm", True)]
    verdicts = {finding.claim: finding.verdict for finding in verification.findings}
    assert verdicts["dtypes.float64"] == verdicts["training"] == "agrees"
    assert verdicts["compiler"] == "not tried"
    assert "dtypes.float64" in done.stdout
    assert f"written: {file}" in done.stdout
    assert "src/anyaccel/backends/verified/" in done.stdout
    assert "1 of 1: ddpm: right" in done.stderr
    assert str(tmp_path) not in file.read_text()


def test_virtual_device_is_labeled_as_virtual(run_cli_forked: RunCli, tmp_path: Path) -> None:
    file = tmp_path / "evidence.json"
    done = run_cli_forked("devices", "virtual:neuron", "--verify", "--pipelines", "none", "--json", "-o", str(file))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["virtual"] is True
    assert "never accepted as evidence" in done.stderr


def test_unavailable_device_is_rejected(run_cli_forked: RunCli) -> None:
    done = run_cli_forked("devices", "neuron", "--verify")
    assert done.returncode == 1
    assert done.stderr.startswith("error: neuron is not available: ")
    assert "\nhint: " in done.stderr


def test_existing_file_is_not_overwritten(run_cli_forked: RunCli, tmp_path: Path) -> None:
    file = tmp_path / "evidence.json"
    file.write_text("mine")
    done = run_cli_forked("devices", "cpu", "--verify", "--output", str(file))
    assert (done.returncode, file.read_text()) == (2, "mine")
    assert "--force" in done.stderr


def test_verification_options_require_verify(run_cli_forked: RunCli) -> None:
    done = run_cli_forked("devices", "cpu", "--quick")
    assert done.returncode == 2
    assert "--verify" in done.stderr
    assert run_cli_forked("devices", "--verify").returncode == 2
