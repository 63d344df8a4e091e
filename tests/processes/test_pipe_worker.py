"""Spawned worker with a pipe: messages, unexpected exits, and no orphan processes."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from anyaccel.processes.pipe_worker import PipeWorker, wait_for_messages
from tests.processes import pipe_children as children

ROOT = Path(__file__).parents[2]


def test_messages_arrive_in_order_both_ways() -> None:
    with PipeWorker(children.echo, "hello", name="echo") as worker:
        assert worker.receive() == "hello"
        assert worker.receive(0.01) is None
        large = bytes(20_000_000)
        for message in (1, large, {"a": (1, 2)}):
            worker.send(message)
        assert [worker.receive() for _ in range(3)] == [1, large, {"a": (1, 2)}]
        pid = worker._process.pid
    assert worker.wait() == -signal.SIGKILL
    assert pid is not None
    assert not psutil.pid_exists(pid)


def test_unpicklable_message_raises_in_send() -> None:
    with PipeWorker(children.echo, name="echo") as worker:
        with pytest.raises((AttributeError, pickle.PicklingError), match="pickle"):
            worker.send(lambda: None)
        worker.send(None)
        worker.send("after it")
        assert worker.receive(60) is None
        assert worker.receive(60) == "after it"


def test_environment_applies_only_to_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLAVOUR", raising=False)
    with PipeWorker(children.describe, name="describe", env={"FLAVOUR": "mint"}) as worker:
        flavour, on_ctrl_c = worker.receive()
        assert (flavour, on_ctrl_c) == ("mint", signal.SIG_IGN)
        assert "FLAVOUR" not in os.environ
        with pytest.raises(EOFError):
            worker.receive()
        assert worker.wait() == 0
    monkeypatch.setenv("FLAVOUR", "plain")
    with PipeWorker(children.describe, name="describe", env={"FLAVOUR": "mint"}) as worker:
        assert worker.receive()[0] == "mint"
    assert os.environ["FLAVOUR"] == "plain"


def test_last_message_of_a_failing_child_arrives() -> None:
    with PipeWorker(children.fail, name="fail") as worker:
        assert worker.receive() == "last message"
        with pytest.raises(EOFError):
            worker.receive()
        worker.send("nobody reads this")
        assert worker.wait() == 1


def test_killed_child_is_noticed_among_others() -> None:
    with PipeWorker(children.hang, name="first") as first, PipeWorker(children.hang, name="second") as second:
        first.receive()
        os.kill(second.receive(), signal.SIGKILL)
        assert wait_for_messages([first, second], 30) == [second]
        with pytest.raises(EOFError):
            second.receive()
        assert wait_for_messages([first], 0.05) == []


def test_hanging_child_blocks_no_sender_and_any_thread_can_kill_it() -> None:
    worker = PipeWorker(children.echo, "ready", name="stopped")
    worker.kill()
    assert worker.wait() is None, "not started yet"
    worker.start()
    worker.receive()
    assert worker._process.pid is not None
    os.kill(worker._process.pid, signal.SIGSTOP)
    started = time.monotonic()
    for _ in range(10):
        worker.send(bytes(10_000_000))
    assert time.monotonic() - started < 5
    assert worker.wait(0.1) is None
    statuses: list[int | None] = []

    def end() -> None:
        worker.kill()
        statuses.append(worker.wait())

    threads = [threading.Thread(target=end) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [-signal.SIGKILL] * 4


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, -signal.SIGINT), (None, 0)]
)
def test_busy_child_exits_with_its_parent(number: int | None, status: int) -> None:
    program = f"from tests.processes.pipe_children import *; start_and_hang(exits={number is None})"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        if number is not None:
            parent.send_signal(number)
        parent.communicate(timeout=30)
    assert parent.returncode == status
    for _ in range(300):
        if not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE:
            break
        time.sleep(0.1)
    else:
        pytest.fail("the child is still running")
