"""The pytest plugin, with a test suite that does not use it and with one that does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import NEEDS_RECIPES, run_in_fork

SUITE = Path(__file__).with_name("foreign_suite")


ARGUMENTS = ["-c", "/dev/null", "--rootdir", str(SUITE), "-p", "no:cacheprovider", "-rA"]
for _plugin in ("anyio", "hypothesispytest", "schemathesis"):  # plugins that take seconds to import in each process
    ARGUMENTS += ["-p", f"no:{_plugin}"]


def run_pytest(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run pytest in a new process with its own configuration and the default number of threads."""
    command = [sys.executable, "-m", "pytest", *ARGUMENTS]
    return subprocess.run([*command, *arguments], cwd=SUITE, capture_output=True, text=True, check=False, timeout=300)


def run_pytest_forked(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run pytest in a fork, where torch is already imported. pytest itself still starts new processes."""
    import anyaccel.emulator.activation  # noqa: F401

    def work() -> None:
        os.chdir(SUITE)
        sys.exit(pytest.main([*ARGUMENTS, *arguments]))

    return run_in_fork(work, ["pytest"], {}, timeout_s=300)


@pytest.mark.slow
def test_a_foreign_suite_on_a_virtual_device() -> None:
    done = run_pytest("test_foreign.py", "--accelerator", "neuron", "--accelerator-strict")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED test_foreign.py::test_the_schedule_is_in_float64" in done.stdout
    assert "PASSED test_foreign.py::test_the_output_has_the_size_of_the_input" in done.stdout
    assert "Neuron" in done.stdout
    assert "(virtual)" in done.stdout
    line = next(line for line in done.stdout.splitlines() if "dtypes.float64" in line and line.startswith("error"))
    assert "test_foreign.py:37" in line


@pytest.mark.long
def test_marked_tests_run_in_separate_processes() -> None:
    done = run_pytest_forked("test_marked.py")
    assert done.returncode == 1
    output = done.stdout
    for passed in ("test_in_a_separate_process[mps]", "test_in_a_separate_process[neuron]", "test_strict_raises[mps]"):
        assert f"PASSED test_marked.py::{passed}" in output, output + done.stderr
    assert "PASSED test_marked.py::test_that_is_not_marked" in output
    assert "FAILED test_marked.py::test_the_ledger_records_a_violation[neuron]" in output
    assert "dtypes.float64" in output
    assert "FAILED test_marked.py::test_that_kills_its_process[hpu]" in output
    assert "status 7" in output
    assert "2 failed, 4 passed" in output


def test_real_devices_that_are_not_available_are_skipped() -> None:
    done = run_pytest_forked("test_marked.py", "--accelerator-real", "-k", "test_in_a_separate_process")
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
def test_each_test_has_its_own_ledger_and_xdist_workers_report_theirs(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text(OWN_LEDGERS)
    done = run_pytest_forked(str(tmp_path / "test_own.py"), "--accelerator", "mps", "-n", "1")
    assert "3 passed, 1 skipped" in done.stdout, done.stdout + done.stderr
    assert "marked for neuron, not mps" in done.stdout
    line = next(line for line in done.stdout.splitlines() if line.startswith("error"))
    assert "dtypes.float64" in line
    assert "test_own.py:6" in line


MODULAR = """
import anyaccel, numpy, pytest
from anyaccel.recipes import recipes, run

RECIPE = recipes()["stable-diffusion-xl-modular"]
EXPECTED = run(RECIPE, RECIPE.make())


@pytest.mark.accelerator("mps", "neuron")
def test_placed(accelerator):
    image = run(RECIPE, anyaccel.place(RECIPE.make(), accelerator.device, dtype="float32"))
    assert numpy.abs(image - EXPECTED).max() < 2e-3
    accelerator.ledger.assert_clean("error", "wrong")


@pytest.mark.accelerator("mps")
def test_plain(accelerator):
    pipe = RECIPE.make()
    pipe.to(accelerator.device)
    image = run(RECIPE, pipe)
    assert numpy.abs(image - EXPECTED).max() < 2e-3
"""


@NEEDS_RECIPES
@pytest.mark.slow  # the tests above run the same code of the plugin
def test_modular_pipelines(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text(MODULAR)
    done = run_pytest_forked(str(tmp_path / "test_own.py"))
    assert "3 passed" in done.stdout, done.stdout + done.stderr


def test_invalid_options_raise_a_usage_error() -> None:
    done = run_pytest_forked("test_foreign.py", "--accelerator", "tpu")
    assert done.returncode == 4
    assert done.stderr.strip().startswith("ERROR: unknown virtual accelerator 'tpu'")
    assert run_pytest_forked("test_foreign.py", "--accelerator", "mps", "--accelerator-real").returncode == 4


def test_the_output_of_a_dead_second_pytest_is_shown(tmp_path: Path) -> None:
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
    assert "exited with status 5" in done.stderr
    assert "the licence has expired" in done.stderr
