"""Function calls in a fork: results, errors, and processes that die."""

import os
import signal
import struct
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import CancelledError
from pathlib import Path

import psutil
import pytest

from anyaccel.errors import ProcessDiedError, UsageError
from anyaccel.processes import forked_call
from anyaccel.processes.forked_call import call_in_fork, forking_threads


class UnpicklableError(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def test_closures_and_large_results() -> None:
    factor = 3
    assert call_in_fork(lambda: bytes(factor) * 10_000_000) == bytes(30_000_000)
    assert call_in_fork(os.getpid) != os.getpid()


def test_error_is_raised_unchanged() -> None:
    def fail() -> None:
        raise UsageError("width is 7", hint="use 8")

    with pytest.raises(UsageError, match="width is 7") as caught:
        call_in_fork(fail)
    assert caught.value.hint == "use 8"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes before Python 3.11")
def test_error_has_the_traceback_of_the_child_as_a_note() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        call_in_fork(lambda: 1 // 0)
    assert "forked_call.py" in caught.value.__notes__[0]


def test_unpicklable_error_keeps_its_text() -> None:
    def fail() -> None:
        raise UnpicklableError(1, 2)

    with pytest.raises(RuntimeError, match=r"UnpicklableError: 1 and 2\n.*Traceback"):
        call_in_fork(fail)


def test_killed_or_exited_child_is_reported_with_its_status() -> None:
    before = psutil.Process().children()
    with pytest.raises(ProcessDiedError, match="the process running a probe exited with status -9"):
        call_in_fork(lambda: os.kill(os.getpid(), signal.SIGKILL), name="a probe")
    with pytest.raises(ProcessDiedError, match="exited with status 7"):
        call_in_fork(lambda: os._exit(7))
    assert psutil.Process().children() == before, "a child or zombie is left"


def test_hanging_child_is_killed() -> None:
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="the function did not return within 0 s"):
        call_in_fork(lambda: time.sleep(60), timeout_s=0.3)
    assert time.monotonic() - started < 30


def test_ctrl_c_in_the_parent_kills_the_child() -> None:
    reader, writer = os.pipe()

    def hang() -> None:
        os.write(writer, str(os.getpid()).encode())
        time.sleep(1)  # the parent waits for the result by then
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        call_in_fork(hang)
    child = int(os.read(reader, 20))
    os.close(reader)
    os.close(writer)
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def wait_until_gone(pid: int) -> None:
    for _ in range(300):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the child is still running")


@pytest.mark.parametrize(
    ("before", "child"),
    [
        pytest.param(
            "", "time.sleep(60)", marks=pytest.mark.skipif(sys.platform != "linux", reason="prctl exists only on Linux")
        ),
        ("forked_call.end_with_parent = lambda parent: None", "time.sleep(1); return bytes(1_000_000)"),
    ],
    ids=["immediately", "when it returns"],
)
def test_child_exits_with_a_killed_parent(before: str, child: str) -> None:
    program = f"""
import os, time
from anyaccel.processes import forked_call
{before}
def call():
    print(os.getpid(), flush=True)
    {child}
forked_call.call_in_fork(call)
"""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    with subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    wait_until_gone(pid)


def test_child_killed_while_it_writes_its_result_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def write_partial_result(*arguments: object) -> None:
        sender = arguments[-2]
        os.write(sender.fileno(), struct.pack("!i", 1000) + b"x" * 10)  # type: ignore[attr-defined]
        os._exit(137)

    monkeypatch.setattr("anyaccel.processes.forked_call._run", write_partial_result)
    with pytest.raises(ProcessDiedError, match="exited with status 137"):
        call_in_fork(lambda: None)


@pytest.mark.long
def test_death_is_noticed_while_children_of_other_threads_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the lock, the second thread would fork right after the first thread created its pipe."""
    forks, sibling_may_start, seconds = [0], threading.Event(), list[float]()
    simplefilter = warnings.simplefilter

    def pause(*arguments: object) -> None:  # called between the creation of the pipe and the fork
        forks[0] += 1
        if forks[0] == 1:
            sibling_may_start.set()
            time.sleep(1)
        simplefilter(*arguments)  # type: ignore[arg-type]

    def die() -> None:
        started = time.monotonic()
        with pytest.raises(ProcessDiedError, match="exited with status 3"):
            call_in_fork(lambda: os._exit(3))
        seconds.append(time.monotonic() - started)

    def run_sibling() -> None:
        sibling_may_start.wait(60)
        call_in_fork(lambda: time.sleep(15))

    monkeypatch.setattr(warnings, "simplefilter", pause)
    threads = [threading.Thread(target=target) for target in (die, run_sibling)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert forks == [2]
    assert seconds[0] < 12, "the death was noticed only when the other child exited"


def test_process_forked_during_another_fork_can_call() -> None:
    with forked_call._fork_lock:
        pid = os.fork()
        if pid == 0:
            signal.alarm(30)
            os._exit(call_in_fork(lambda: 3))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3


def test_error_kills_the_children_of_a_pool_and_starts_no_more() -> None:
    reader, writer = os.pipe()

    def hang() -> None:
        os.write(writer, f"{os.getpid()}\n".encode())
        time.sleep(60)

    def call_twice() -> None:
        try:
            call_in_fork(hang)
        finally:
            call_in_fork(hang)

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt), forking_threads(2) as pool:  # noqa: PT012
        calls = [pool.submit(call_twice) for _ in range(3)]
        pids = ""
        while pids.count("\n") < 2:
            pids += os.read(reader, 100).decode()
        raise KeyboardInterrupt
    assert time.monotonic() - started < 30
    os.close(writer)
    assert os.read(reader, 100) == b"", "a third child was started"
    os.close(reader)
    for call in calls:
        with pytest.raises(CancelledError):
            call.result()
    for pid in pids.split():
        wait_until_gone(int(pid))
