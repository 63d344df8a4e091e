"""`anyaccel devices`, as a user runs it."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import RunCli

EIGHT = {"cpu", "cuda", "mps", "hpu", "neuron", "xpu", "npu", "mlu"}


def test_the_table_names_every_backend(run_cli: RunCli) -> None:
    done = run_cli("devices")
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in EIGHT)
    assert done.stdout.index("available\n") < done.stdout.index("not available on this machine")
    assert done.stderr == ""


def test_json_lists_the_eight_with_reason_and_hint(run_cli: RunCli) -> None:
    rows = json.loads(run_cli("devices", "--json").stdout)
    assert {row["name"] for row in rows if row["origin"] == "anyaccel"} == EIGHT
    for row in rows:
        assert isinstance(row["available"], bool)
        assert row["reason"]
        assert row["available"] or row["hint"]
        assert row["available"] == (row["count"] > 0)


@pytest.mark.parametrize("name", [*sorted(EIGHT), "rocm"])
def test_one_name_shows_its_whole_sheet_with_sources(run_cli_forked: RunCli, name: str) -> None:
    done = run_cli_forked("devices", name)
    assert done.returncode == 0, done.stderr
    sections = ["Dtypes", "Behavior", "Size and operation limits", "Software", "Requirements", "Products"]
    assert all(section in done.stdout for section in sections)
    assert "https://" in done.stdout


def test_one_name_as_json(run_cli_forked: RunCli) -> None:
    sheet = json.loads(run_cli_forked("devices", "mps", "--json").stdout)
    assert sheet["name"] == "mps"
    assert sheet["dtypes"]["float64"]["effect"] == "error"
    assert sheet["dtypes"]["float64"]["source"].startswith("https://")


def test_the_report_can_be_pasted_into_an_issue(run_cli: RunCli) -> None:
    report = run_cli("devices", "--report").stdout
    assert report.startswith("```text\n")
    assert report.rstrip().endswith("```")
    assert "torch: " in report
    assert "diffusers: " in report


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["devices", "nueron"], "unknown device 'nueron'", "did you mean neuron?"),
        (["devices", "cuda:x"], "'cuda:x' is not a valid device", "hpu:3"),
        (
            ["devices", "--report", "--json"],
            "--report cannot be combined with NAME or --json",
            "anyaccel devices --report",
        ),
    ],
)
def test_a_wrong_call_ends_with_two_and_a_hint(
    run_cli_forked: RunCli, arguments: list[str], message: str, hint: str
) -> None:
    done = run_cli_forked(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert hint in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("arguments", [["devices", "--nonsense"], ["nonsense"]])
def test_typing_errors_end_with_two(run_cli_forked: RunCli, arguments: list[str]) -> None:
    done = run_cli_forked(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_the_version(run_cli: RunCli) -> None:
    assert run_cli("--version").stdout.startswith("anyaccel 0.")


def test_a_reader_that_goes_away_leaves_no_traceback() -> None:
    command = f"{shlex.quote(sys.executable)} -m anyaccel devices mps | head -n 1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, timeout=60)
    assert "Apple" in done.stdout
    assert done.stderr == ""


def test_a_fault_of_ours_is_one_line_and_status_three() -> None:
    code = (
        "import anyaccel.cli.devices as d, anyaccel.cli.main as m, sys\n"
        "d.devices = lambda: 1 / 0\n"
        "sys.argv = ['anyaccel', 'devices']\n"
        "m.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 3
    assert "ZeroDivisionError" in done.stderr
    assert "Traceback" not in done.stderr
    assert "hint:" in done.stderr


@pytest.mark.parametrize(
    "variables", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C"}, {"NO_COLOR": "1", "COLUMNS": "40"}]
)
def test_a_poor_terminal_is_served_too(run_cli: RunCli, variables: dict[str, str]) -> None:
    for arguments in (["devices"], ["devices", "mps"]):
        done = run_cli(*arguments, **variables)
        assert done.returncode == 0, done.stderr
        assert done.stdout


def test_a_closed_output_is_no_fault() -> None:
    command = f"{shlex.quote(sys.executable)} -m anyaccel devices >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], check=False, timeout=60).returncode == 0


def test_lines_are_left_whole_so_that_addresses_can_be_copied(run_cli_forked: RunCli) -> None:
    shown = run_cli_forked("devices", "hpu", COLUMNS="40").stdout
    assert "https://docs.habana.ai/en/latest/PyTorch/Model_Optimization_PyTorch/Dynamic_Shapes.html\n" in shown


def test_the_report_names_no_home_and_keeps_its_fence(run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "torch_npu.py").write_text(f"raise ImportError('{tmp_path}/secret\\n```')")
    report = run_cli("devices", "--report", PYTHONPATH=str(tmp_path), HOME=str(tmp_path)).stdout
    assert "npu: not available: the required software is installed but raises an error: ImportError: ~/secret" in report
    assert report.count("```") == 2


@pytest.mark.long
@pytest.mark.parametrize("code", ["import sys; sys.exit(0)", "print('banner')", "raise OSError('no card')"])
def test_a_vendor_module_may_do_its_worst(run_cli: RunCli, tmp_path: Path, code: str) -> None:
    (tmp_path / "torch_npu.py").write_text(code)
    done = run_cli("devices", "--json", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert not rows["npu"]["available"]
    assert rows["cpu"]["available"]


@pytest.mark.parametrize("columns", [60, 80, 140])
def test_unavailable_devices_take_one_line_each(run_cli_forked: RunCli, columns: int) -> None:
    lines = run_cli_forked("devices", COLUMNS=str(columns)).stdout.splitlines()
    unavailable = lines[lines.index("not available on this machine") + 1 :]
    unavailable = unavailable[: unavailable.index("")]
    assert len(unavailable) == len({line.split()[0] for line in unavailable}) >= 1
    assert all(len(line) <= columns for line in unavailable)
