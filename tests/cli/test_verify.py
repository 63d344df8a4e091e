"""`anyaccel devices NAME --verify`, as a user runs it."""

import json
from pathlib import Path

import pytest

from anyaccel.backends.evidence import read_verification
from tests.conftest import NEEDS_RECIPES, RunCli


@pytest.mark.long
@NEEDS_RECIPES
def test_the_host_agrees_with_its_sheet(run_cli: RunCli, tmp_path: Path) -> None:
    file = tmp_path / "evidence.json"
    done = run_cli(
        "devices", "cpu", "--verify", "--quick", "--pipelines", "ddpm", "--jobs", "1", "--output", str(file),
        "--signed-off-by", "A. Name", HOME=str(tmp_path),
    )  # fmt: skip
    seen = read_verification(file.read_text(), file.name)
    assert done.returncode == (0 if seen.holds else 1), done.stderr
    assert not seen.virtual
    assert seen.signed_off_by == "A. Name"
    assert [(one.recipe, one.right) for one in seen.pipelines] == [("ddpm", True)]
    verdicts = {one.claim: one.verdict for one in seen.findings}
    assert verdicts["dtypes.float64"] == verdicts["training"] == "agrees"
    assert verdicts["compiler"] == "not tried"
    assert "dtypes.float64" in done.stdout
    assert f"written: {file}" in done.stdout
    assert "src/anyaccel/backends/verified/" in done.stdout
    assert "1 of 1: ddpm: right" in done.stderr
    assert str(tmp_path) not in file.read_text()


def test_a_virtual_device_says_that_it_is_one(run_cli: RunCli, tmp_path: Path) -> None:
    file = tmp_path / "evidence.json"
    done = run_cli("devices", "virtual:neuron", "--verify", "--pipelines", "none", "--json", "-o", str(file))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["virtual"] is True
    assert "never taken in" in done.stderr


def test_a_device_that_is_not_here(run_cli_forked: RunCli) -> None:
    done = run_cli_forked("devices", "neuron", "--verify")
    assert done.returncode == 1
    assert done.stderr.startswith("error: neuron is not available: ")
    assert "\nhint: " in done.stderr


def test_a_file_is_not_written_over(run_cli_forked: RunCli, tmp_path: Path) -> None:
    file = tmp_path / "evidence.json"
    file.write_text("mine")
    done = run_cli_forked("devices", "cpu", "--verify", "--output", str(file))
    assert (done.returncode, file.read_text()) == (2, "mine")
    assert "--force" in done.stderr


def test_options_of_a_verification_go_with_it(run_cli_forked: RunCli) -> None:
    done = run_cli_forked("devices", "cpu", "--quick")
    assert done.returncode == 2
    assert "--verify" in done.stderr
    assert run_cli_forked("devices", "--verify").returncode == 2
