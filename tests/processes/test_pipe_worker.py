"""A spawned worker with a pipe: messages, death, and no process that outlives its parent."""

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


def test_messages_go_both_ways_in_order() -> None:
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


def test_a_message_that_cannot_be_pickled_is_the_senders_error() -> None:
    with PipeWorker(children.echo, name="echo") as worker:
        with pytest.raises((AttributeError, pickle.PicklingError), match="pickle"):
            worker.send(lambda: None)
        worker.send(None)
        worker.send("after it")
        assert worker.receive(60) is None
        assert worker.receive(60) == "after it"


def test_the_environment_is_the_childs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_last_message_of_a_child_that_raises_arrives_before_its_end() -> None:
    with PipeWorker(children.fail, name="fail") as worker:
        assert worker.receive() == "last message"
        with pytest.raises(EOFError):
            worker.receive()
        worker.send("nobody reads this")
        assert worker.wait() == 1


def test_a_child_that_is_killed_is_noticed_among_others() -> None:
    with PipeWorker(children.hang, name="one") as one, PipeWorker(children.hang, name="two") as two:
        one.receive()
        os.kill(two.receive(), signal.SIGKILL)
        assert wait_for_messages([one, two], 30) == [two]
        with pytest.raises(EOFError):
            two.receive()
        assert wait_for_messages([one], 0.05) == []


def test_sending_to_a_child_that_hangs_does_not_block_and_any_thread_may_kill_it() -> None:
    worker = PipeWorker(children.echo, "ready", name="stopped")
    worker.kill()
    assert worker.wait() is None, "it has not begun"
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
def test_a_busy_child_ends_with_its_parent(number: int | None, status: int) -> None:
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
        pytest.fail("the child still runs")
