"""The pytest plugin, run against a suite that knows nothing of it, and against one whose author uses it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import run_in_fork

SUITE = Path(__file__).with_name("foreign_suite")


WORDS = ["-c", "/dev/null", "--rootdir", str(SUITE), "-p", "no:cacheprovider", "-rA"]
for _other in ("anyio", "hypothesispytest", "schemathesis"):  # plugins that take seconds to import, in each process
    WORDS += ["-p", f"no:{_other}"]


def run_pytest(*words: str) -> "subprocess.CompletedProcess[str]":
    """In a process and a configuration of its own, with as many threads as torch likes."""
    command = [sys.executable, "-m", "pytest", *WORDS]
    return subprocess.run([*command, *words], cwd=SUITE, capture_output=True, text=True, check=False, timeout=300)


def run_pytest_forked(*words: str) -> "subprocess.CompletedProcess[str]":
    """The same in a fork of this process, in which torch is imported: what pytest starts of itself starts afresh."""
    import anyaccel.emulator.activation  # noqa: F401

    def work() -> None:
        os.chdir(SUITE)
        sys.exit(pytest.main([*WORDS, *words]))

    return run_in_fork(work, ["pytest"], {}, timeout_s=300)


@pytest.mark.long
def test_a_foreign_suite_on_a_virtual_device() -> None:
    done = run_pytest("test_foreign.py", "--accelerator", "neuron", "--accelerator-strict")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED test_foreign.py::test_the_schedule_is_precise" in done.stdout
    assert "PASSED test_foreign.py::test_the_model_gives_a_picture_of_the_same_size" in done.stdout
    assert "Neuron" in done.stdout
    assert "(virtual)" in done.stdout
    line = next(line for line in done.stdout.splitlines() if "dtypes.float64" in line and line.startswith("error"))
    assert "test_foreign.py:37" in line


@pytest.mark.long
def test_marked_tests_run_in_a_process_each() -> None:
    done = run_pytest_forked("test_marked.py")
    assert done.returncode == 1
    said = done.stdout
    for passed in ("test_in_a_process_each[mps]", "test_in_a_process_each[neuron]", "test_strict_raises[mps]"):
        assert f"PASSED test_marked.py::{passed}" in said, said + done.stderr
    assert "PASSED test_marked.py::test_that_is_not_marked" in said
    assert "FAILED test_marked.py::test_the_ledger_tells[neuron]" in said
    assert "dtypes.float64" in said
    assert "FAILED test_marked.py::test_that_kills_its_process[hpu]" in said
    assert "status 7" in said
    assert "2 failed, 4 passed" in said


def test_real_devices_that_are_not_here_are_skipped_with_the_reason() -> None:
    done = run_pytest_forked("test_marked.py", "--accelerator-real", "-k", "test_in_a_process_each")
    assert done.returncode == 0, done.stdout
    assert "2 skipped" in done.stdout
    assert "SKIPPED" in done.stdout


OWN_LEDGERS = """
import pytest, torch


def test_earlier():
    torch.ones(2, device="mps").double()


@pytest.mark.accelerator("mps")
def test_clean(accelerator):
    torch.ones(2, device=accelerator.device)
    accelerator.ledger.assert_clean("error", "wrong")


@pytest.mark.accelerator("mps", strict=True)
def test_strict(accelerator):
    with pytest.raises(TypeError):
        torch.ones(2, device=accelerator.device).double()


@pytest.mark.accelerator("neuron")
def test_of_another_device(accelerator):
    raise AssertionError
"""


@pytest.mark.long
def test_on_one_device_each_test_has_its_ledger_and_workers_hand_theirs_over(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text(OWN_LEDGERS)
    done = run_pytest_forked(str(tmp_path / "test_own.py"), "--accelerator", "mps", "-n", "1")
    assert "3 passed, 1 skipped" in done.stdout, done.stdout + done.stderr
    assert "it is marked for neuron, not mps" in done.stdout
    line = next(line for line in done.stdout.splitlines() if line.startswith("error"))
    assert "dtypes.float64" in line
    assert "test_own.py:6" in line


def test_what_cannot_be_is_said_in_a_line() -> None:
    done = run_pytest_forked("test_foreign.py", "--accelerator", "tpu")
    assert done.returncode == 4
    assert done.stderr.strip().startswith("ERROR: no virtual accelerator is called 'tpu'")
    assert run_pytest_forked("test_foreign.py", "--accelerator", "mps", "--accelerator-real").returncode == 4


def test_what_the_second_pytest_printed_before_it_ended_is_told(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "import os, sys\n"
        "def pytest_collection_modifyitems(config):\n"
        "    if config.getoption('--accelerator-second'):\n"
        "        print('the licence has expired', file=sys.stderr, flush=True)\n"
        "        os._exit(5)\n"
    )
    (tmp_path / "test_own.py").write_text(OWN_LEDGERS)
    done = run_pytest_forked(str(tmp_path / "test_own.py"), "-k", "test_clean", "-s")
    assert done.returncode == 4, done.stdout
    assert "ended with status 5" in done.stderr
    assert "the licence has expired" in done.stderr
