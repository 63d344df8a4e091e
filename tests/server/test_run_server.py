"""The life of a service: workers that die or hang, an end in good order, and an end in none."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from anyaccel.errors import UsageError
from anyaccel.server.jobs.dispatcher import Dispatcher
from anyaccel.server.jobs.events import EventBus
from anyaccel.server.jobs.metrics import Metrics
from anyaccel.server.jobs.store import JobStore
from anyaccel.server.run_server import check_address
from anyaccel.server.settings import ServerLimits, ServerSettings, read_limits, read_lora, read_served_names
from anyaccel.server.worker.messages import ModelsReady
from tests.server.kills import kill_often
from tests.server.live import Live

LONG = {"prompt": "a dog", "num_inference_steps": 1000, "seed": 1}
"""Longer than a test may be held up between two of its steps."""
LIMITS = ("--limit", "max_steps=1000")


@pytest.mark.long
def test_a_worker_that_dies_or_hangs_is_replaced_and_an_end_waits_for_what_is_under_way(tmp_path: Path) -> None:
    live = Live(tmp_path, "--max-batch", "1", "--limit", "hang_s=15", *LIMITS)
    with live.http() as http:
        first, second = (http.post("/v1/jobs", json=LONG).json()["id"] for _ in range(2))
        live.wait_state(http, first, "running")
        os.kill(live.find_worker(), signal.SIGKILL)
        live.wait_state(http, first, "queued")
        assert http.get("/readyz").status_code == 503
        assert live.wait_state(http, first, "running")["attempts"] == 2
        stuck = live.find_worker()
        os.kill(stuck, signal.SIGSTOP)
        failed = live.wait_state(http, first, "failed")
        assert failed["error"]["code"] == "worker_died", "it was run again once, and not for ever"
        assert not psutil.pid_exists(stuck)
        http.post(f"/v1/jobs/{second}/cancel")
        answers: list[httpx.Response] = []
        last = {"prompt": "a cat", "num_inference_steps": 60, "seed": 1}
        live.wait_state(http, second, "cancelled")
        asking = threading.Thread(target=lambda: answers.append(http.post("/v1/images/generations", json=last)))
        with live.http() as other:
            asking.start()
            end = time.monotonic() + 180
            while not any(one["state"] == "running" for one in other.get("/v1/jobs").json()["data"]):
                assert time.monotonic() < end
                time.sleep(0.02)
            worker = live.find_worker()
            live.process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
            late = other.post("/v1/jobs", json=LONG)
            assert (late.status_code, late.json()["error"]["code"]) == (503, "not_ready")
            asking.join(180)
        assert answers[0].status_code == 200
        assert len(answers[0].json()["data"]) == 1
    assert live.end() == 0
    assert not psutil.pid_exists(worker)


@pytest.mark.slow
def test_kills_at_random_moments_lose_nothing(tmp_path: Path) -> None:
    told, states = kill_often(5, tmp_path, seed=4)
    assert told.wrong == []
    assert len(told.accepted) > 2
    assert set(states) <= {"done", "failed"}


class Silent:
    """A place of work that says nothing at its first start, and is ready at its second."""

    heals = False

    def __init__(self, starts: list["Silent"]) -> None:
        self.words: list[Any] = [ModelsReady(())] if starts else []
        self.ended = threading.Event()
        starts.append(self)

    def start(self) -> None:
        return

    def send(self, message: object) -> None:
        raise AssertionError("there is nothing to do")

    def hear(self, timeout_s: float) -> Any:
        if self.words:
            return self.words.pop()
        if self.ended.wait(0.01):
            raise EOFError
        return None

    def has_room(self, busy: int, pictures: int) -> bool:
        return True

    def end(self) -> None:
        self.ended.set()

    def describe_end(self) -> str:
        return "in silence"


def test_a_worker_that_hangs_while_it_starts_is_replaced(tmp_path: Path) -> None:
    settings = ServerSettings(models=(), data=tmp_path, limits=replace(ServerLimits(), hang_s=0.5))
    jobs, starts = JobStore(tmp_path), list[Silent]()
    dispatcher = Dispatcher(settings, jobs, EventBus(), Metrics(jobs), lambda _: Silent(starts))
    dispatcher.start()
    end = time.monotonic() + 60
    while not dispatcher.is_ready():
        assert time.monotonic() < end
        time.sleep(0.01)
    dispatcher.stop()
    jobs.close()
    assert len(starts) == 2
    assert all(one.ended.is_set() for one in starts)


class Slow(Silent):
    """A place of work that is ready at once and never finishes a job."""

    def __init__(self) -> None:
        super().__init__([])
        self.words = [ModelsReady(())]

    def send(self, message: object) -> None:
        return


def test_a_job_outlives_any_number_of_orderly_stops(tmp_path: Path) -> None:
    settings = ServerSettings(models=(), data=tmp_path)
    for number in range(3):
        jobs = JobStore(tmp_path)
        if number == 0:
            jobs.submit({"seeds": [1], "output_format": "png"})
        dispatcher = Dispatcher(settings, jobs, EventBus(), Metrics(jobs), lambda _: Slow())
        dispatcher.start()
        end = time.monotonic() + 60
        while not jobs.count("running"):
            assert time.monotonic() < end, jobs.list()
            time.sleep(0.01)
        assert jobs.list()[0].attempts == 1
        dispatcher.stop()
        [job] = jobs.list()
        assert (job.state, job.attempts, job.error) == ("queued", 0, None)
        jobs.close()


def run(*options: str, **environment: str) -> Any:
    command = [sys.executable, "-m", "anyaccel", "serve", *options]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, **environment}, check=False
    )


@pytest.mark.long
def test_what_cannot_be_served_is_said_and_ends(tmp_path: Path) -> None:
    missing = run(str(tmp_path / "none"), "--port", "0", "--data", str(tmp_path / "data"))
    assert (missing.returncode, "Traceback" in missing.stderr) == (3, False)
    assert "cannot start" in missing.stderr
    open_to_all = run("--host", "0.0.0.0", "--data", str(tmp_path / "data"), ANYACCEL_API_KEYS="")
    assert open_to_all.returncode == 2
    assert "no key" in open_to_all.stderr


def test_settings_of_the_command_line() -> None:
    limits = read_limits(["max_steps=5", "deadline_s=1.5"], 7)
    assert (limits.max_steps, limits.deadline_s, limits.max_queue) == (5, 1.5, 7)
    for text, words in (("steps=5", "no limit"), ("max_steps=many", "is a number"), ("max_n=-1", "is a number")):
        with pytest.raises(UsageError, match=words):
            read_limits([text], 7)
    (one, other) = read_served_names(["embedded", "big=org/name"])
    assert (one.name, one.model, other.name, other.model) == ("embedded", "embedded", "big", "org/name")
    with pytest.raises(UsageError, match="one name"):
        read_served_names(["a=x", "a=y"])
    with pytest.raises(UsageError, match="no adapter"):
        read_lora("ink")


def test_addresses_that_others_reach_want_a_key() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.2", "example.org"):
        with pytest.raises(UsageError, match="no key is wanted"):
            check_address(host, (), without_key=False)
        check_address(host, ("key",), without_key=False)
        check_address(host, (), without_key=True)
    for host in ("127.0.0.1", "localhost", "::1", "127.8.8.8"):
        check_address(host, (), without_key=False)


@pytest.mark.long
def test_a_request_has_a_deadline_and_a_kill_loses_nothing(tmp_path: Path) -> None:
    live = Live(tmp_path, "--max-batch", "1", "--limit", "deadline_s=12", *LIMITS)
    with live.http() as http:
        waiting = http.post("/v1/jobs", json=LONG).json()["id"]
        live.wait_state(http, waiting, "running")
        late = http.post("/v1/images/generations", json=LONG)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded"), "while it waited"
        assert live.wait_state(http, waiting, "failed")["error"]["code"] == "deadline_exceeded"
        short = http.post("/v1/images/generations", json={**LONG, "num_inference_steps": 1})
        assert short.status_code == 200
        steps = (100, 8, 8)
        jobs = [http.post("/v1/jobs", json={**LONG, "num_inference_steps": one}).json()["id"] for one in steps]
        live.wait_state(http, jobs[0], "running")
    live.end(signal.SIGKILL)
    again = Live(tmp_path, "--max-batch", "1")
    with again.http() as http:
        for job in jobs:
            assert again.wait_state(http, job, "done")["images"][0]["seed"] == LONG["seed"]
        assert len(http.get("/v1/jobs").json()["data"]) == 6, "none twice"
    assert again.end() == 0
