"""A function call in a fork: its result, its error, its death."""

import os
import signal
import sys
import time

import psutil
import pytest

from anyaccel.errors import ProcessDiedError, UsageError
from anyaccel.processes.forked_call import call_in_fork


class UnpicklableError(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def test_a_large_result_and_a_closure_cross() -> None:
    factor = 3
    assert call_in_fork(lambda: bytes(factor) * 10_000_000) == bytes(30_000_000)
    assert call_in_fork(os.getpid) != os.getpid()


def test_an_error_is_raised_unchanged() -> None:
    def fail() -> None:
        raise UsageError("width is 7", hint="take 8")

    with pytest.raises(UsageError, match="width is 7") as caught:
        call_in_fork(fail)
    assert caught.value.hint == "take 8"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes before Python 3.11")
def test_an_error_has_the_childs_traceback_as_a_note() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        call_in_fork(lambda: 1 // 0)
    assert "forked_call.py" in caught.value.__notes__[0]


def test_an_error_that_cannot_be_pickled_keeps_its_text() -> None:
    def fail() -> None:
        raise UnpicklableError(1, 2)

    with pytest.raises(RuntimeError, match=r"UnpicklableError: 1 and 2\n.*Traceback"):
        call_in_fork(fail)


def test_a_child_that_is_killed_or_exits_is_reported_with_its_status() -> None:
    before = psutil.Process().children()
    with pytest.raises(ProcessDiedError, match="the process of a probe died with status -9"):
        call_in_fork(lambda: os.kill(os.getpid(), signal.SIGKILL), name="a probe")
    with pytest.raises(ProcessDiedError, match="died with status 7"):
        call_in_fork(lambda: os._exit(7))
    assert psutil.Process().children() == before, "none is left, and no zombie"


def test_a_child_that_hangs_is_killed() -> None:
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="the function gave no answer in 0 s"):
        call_in_fork(lambda: time.sleep(60), timeout_s=0.3)
    assert time.monotonic() - started < 30


def test_ctrl_c_in_the_parent_kills_the_child() -> None:
    reader, writer = os.pipe()

    def hang() -> None:
        os.write(writer, str(os.getpid()).encode())
        time.sleep(1)  # the parent waits for the answer
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        call_in_fork(hang)
    child = int(os.read(reader, 20))
    os.close(reader)
    os.close(writer)
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
