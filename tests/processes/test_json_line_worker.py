"""Worker process with JSON lines: output, exit, and errors in the parent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from anyaccel.processes.json_line_worker import JsonLineWorker

ROOT = Path(__file__).parents[2]
CHILD = "tests.processes.json_child"


def start(*arguments: str, **env: str) -> JsonLineWorker:
    return JsonLineWorker(CHILD, *arguments, cwd=ROOT, env=env)


def test_messages_arguments_and_environment() -> None:
    with start("one", "two", FLAVOUR="mint") as worker:
        assert worker.request({"a": [1, None, "é"]}) == {"a": [1, None, "é"]}
        large = "x" * 5_000_000
        assert worker.request(large) == large
        pid, *description = worker.request("describe")
        assert description == [["one", "two"], "mint", str(ROOT), str(ROOT)]
    assert not psutil.pid_exists(pid)


def test_output_of_the_child_is_captured_and_not_an_answer() -> None:
    with start() as worker:
        assert worker.request("print") == "", "requests are not on stdin"
        assert worker.request(1) == 1
        assert worker.close() == 0
        assert sorted(worker.stderr.splitlines()) == [
            "a clean end",
            "before the connection",
            "by another process",
            "printed",
            "written",
        ]
        assert worker.kill() == 0, "the exit status does not change"


def test_child_that_raises() -> None:
    with start() as worker:
        with pytest.raises(EOFError):
            worker.request("raise")
        assert worker.close() == 1
        assert worker.stderr.endswith("ValueError: seven\n")


def test_killed_child() -> None:
    with start() as worker:
        worker.send("die")
        with pytest.raises(EOFError):
            worker.receive()
        worker.send("x" * 200_000)  # more than the pipe buffer
        with pytest.raises(EOFError):
            worker.receive()
        assert worker.close() == -signal.SIGKILL


def test_hanging_child_is_killed_after_the_timeout() -> None:
    started = time.monotonic()
    with start() as worker:
        assert worker.request(1) == 1
        with pytest.raises(EOFError):
            worker.request("hang", timeout_s=0.2)
        assert worker.close() == -signal.SIGKILL
    with start() as worker:
        worker.send("hang")
        assert worker.close(timeout_s=0.2) == -signal.SIGKILL
    assert time.monotonic() - started < 50


def test_missing_module() -> None:
    with JsonLineWorker("no_such_module") as worker:
        with pytest.raises(EOFError):
            worker.request(1)
        assert worker.close() == 1
        assert "No module named no_such_module" in worker.stderr


PARENT = f"""
import time
from anyaccel.processes.json_line_worker import JsonLineWorker
with JsonLineWorker({CHILD!r}) as worker:
    print(worker.request("describe")[0], flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, -signal.SIGINT)])
def test_child_exits_with_its_parent(number: int, status: int) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(number)
        assert parent.wait(30) == status
        child.wait(30)
