"""SIGTERM: commands clean up, and a second signal does not disturb the cleanup."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import typer

from anyaccel.cli.interrupts import cleanup_on_exit


def send_sigterm() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_termination_is_reported_with_its_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    handler, cleaned_up = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with cleanup_on_exit() as display:
            display.start_phase("Working")
            try:
                send_sigterm()
            finally:
                send_sigterm()  # again, during the cleanup
                cleaned_up.append(True)

    with pytest.raises(typer.Exit) as caught:
        work()
    assert caught.value.exit_code == 143
    assert cleaned_up == [True]
    assert "terminated" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == handler


HANGING = """
import os, sys, time
from anyaccel.checking.chart import chart
from anyaccel.checking import run
from anyaccel.processes.forked_call import call_in_fork

def hang(*args):
    def sleep():
        print(os.getpid(), flush=True)
        time.sleep(60)
    return call_in_fork(sleep)

run.run_on_cpu = lambda recipes: {}
run.run_on_device = chart._run_group = hang
sys.argv[0] = "anyaccel"
from anyaccel.cli.main import main
main()
"""
"""The command line with child processes that hang instead of running pipelines."""


@pytest.mark.slow
@pytest.mark.parametrize("command", ["check pixart-alpha --device mps", "chart --family dit --device mps --keep kept"])
def test_sigterm_ends_the_children_of_a_command(command: str, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src"), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", HANGING, *command.split()],
        env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        child = int(process.stdout.readline())
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=50)
    assert time.monotonic() - started < 30
    assert process.returncode == 143, errors
    assert errors.splitlines()[-1] == "terminated"
    assert ("saved 0 pipelines to kept" in errors) == ("--keep" in command)
    assert not psutil.pid_exists(child)
