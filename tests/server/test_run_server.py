"""Lifecycle of a service: workers that die or hang, graceful shutdown and crashes."""

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
from tests.conftest import NEEDS_RECIPES
from tests.server.kills import VIDEO, kill_repeatedly, save_video_model
from tests.server.live import Live

LONG = {"prompt": "a dog", "num_inference_steps": 20_000, "seed": 1}
"""A job that is still running whenever a test checks it."""
LIMITS = ("--limit", "max_steps=20000")


@pytest.mark.slow
def test_deadlines_a_killed_service_a_dead_worker_and_a_graceful_shutdown(tmp_path: Path, folder: Path) -> None:
    """One test with two services: each service and each new worker imports torch and diffusers."""
    killed = Live(tmp_path, f"tiny={folder}", "--max-batch", "1", "--limit", "deadline_s=6", *LIMITS)
    jobs = check_deadline_and_kill(killed)
    restarted = Live(tmp_path, f"tiny={folder}", "--max-batch", "1", *LIMITS)
    with restarted.http() as http:
        for job in jobs:
            assert restarted.wait_state(http, job, "done")["images"][0]["seed"] == LONG["seed"]
        assert len(http.get("/v1/jobs").json()["data"]) == 6, "no job was created twice"
        running = http.post("/v1/jobs", json=LONG).json()["id"]
        restarted.wait_state(http, running, "running")
        os.kill(restarted.find_worker(), signal.SIGKILL)
        restarted.wait_state(http, running, "queued")
        assert http.get("/readyz").status_code == 503
        assert restarted.wait_state(http, running, "running")["attempts"] == 2
        http.post(f"/v1/jobs/{running}/cancel")
        restarted.wait_state(http, running, "cancelled")
        check_graceful_shutdown(restarted, http)


def check_deadline_and_kill(live: Live) -> list[str]:
    """Check the deadline of queued and running jobs, then kill the service; return its unfinished jobs."""
    with live.http() as http:
        waiting = http.post("/v1/jobs", json=LONG).json()["id"]
        live.wait_state(http, waiting, "running")
        late = http.post("/v1/images/generations", json=LONG)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded"), "while it was queued"
        assert live.wait_state(http, waiting, "failed")["error"]["code"] == "deadline_exceeded"
        short = http.post("/v1/images/generations", json={**LONG, "num_inference_steps": 1})
        assert short.status_code == 200
        steps = (100, 2, 2)
        jobs = [http.post("/v1/jobs", json={**LONG, "num_inference_steps": count}).json()["id"] for count in steps]
        live.wait_state(http, jobs[0], "running")
    live.end(signal.SIGKILL)
    return jobs


def check_graceful_shutdown(live: Live, http: httpx.Client) -> None:
    """Check that a service that gets SIGTERM finishes its running job, rejects new ones and ends its worker."""
    responses: list[httpx.Response] = []
    last = {"prompt": "a cat", "num_inference_steps": 100, "seed": 1}
    client = threading.Thread(target=lambda: responses.append(http.post("/v1/images/generations", json=last)))
    with live.http() as other:
        client.start()
        end = time.monotonic() + 180
        while not any(job["state"] == "running" for job in other.get("/v1/jobs").json()["data"]):
            assert time.monotonic() < end
            time.sleep(0.02)
        worker = live.find_worker()
        live.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        late = other.post("/v1/jobs", json=LONG)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "not_ready")
        client.join(180)
    assert responses[0].status_code == 200
    assert len(responses[0].json()["data"]) == 1
    assert live.end() == 0
    assert not psutil.pid_exists(worker)


@pytest.mark.slow
def test_a_dead_and_then_hung_worker_is_replaced_and_the_job_fails(tmp_path: Path, folder: Path) -> None:
    """The same as `test_a_worker_that_hangs_during_a_job_is_replaced`, with real workers."""
    live = Live(tmp_path, f"tiny={folder}", "--max-batch", "1", "--limit", "hang_s=15", *LIMITS)
    with live.http() as http:
        first, second = (http.post("/v1/jobs", json=LONG).json()["id"] for _ in range(2))
        live.wait_state(http, first, "running")
        os.kill(live.find_worker(), signal.SIGKILL)
        live.wait_state(http, first, "queued")
        assert live.wait_state(http, first, "running")["attempts"] == 2
        hung = live.find_worker()
        os.kill(hung, signal.SIGSTOP)
        failed = live.wait_state(http, first, "failed")
        assert failed["error"]["code"] == "worker_died", "a job is retried only once"
        assert not psutil.pid_exists(hung)
        http.post(f"/v1/jobs/{second}/cancel")
        live.wait_state(http, second, "cancelled")
    assert live.end() == 0


@pytest.mark.slow
def test_kill_at_random_times_loses_no_job(tmp_path: Path) -> None:
    observations, states = kill_repeatedly(5, tmp_path, seed=4)
    assert observations.errors == []
    assert states["done"] > 2


@NEEDS_RECIPES
@pytest.mark.slow
def test_kill_at_random_times_loses_no_video(tmp_path: Path) -> None:
    models = (save_video_model(tmp_path / "wan"), "--sizes", "32x32")
    observations, states = kill_repeatedly(4, tmp_path / "data", seed=4, models=models, body=VIDEO)
    assert observations.errors == []
    assert states["done"] > 0


class HangsAtFirstStart:
    """A transport that sends nothing after its first start and is ready after its second."""

    self_healing = False

    def __init__(self, starts: list["HangsAtFirstStart"]) -> None:
        self.messages: list[Any] = [ModelsReady(())] if starts else []
        self.ended = threading.Event()
        starts.append(self)

    def start(self) -> None:
        return

    def send(self, message: object) -> None:
        raise AssertionError("no job was submitted")

    def receive(self, timeout_s: float) -> Any:
        if self.messages:
            return self.messages.pop()
        if self.ended.wait(0.01):
            raise EOFError
        return None

    def has_capacity(self, busy: int, images: int) -> bool:
        return True

    def end(self) -> None:
        self.ended.set()

    def describe_end(self) -> str:
        return "in a test"


def test_a_worker_that_hangs_at_its_start_is_replaced(tmp_path: Path) -> None:
    settings = ServerSettings(models=(), data=tmp_path, limits=replace(ServerLimits(), hang_s=0.5))
    jobs, starts = JobStore(tmp_path), list[HangsAtFirstStart]()
    dispatcher = Dispatcher(settings, jobs, EventBus(), Metrics(jobs), lambda _: HangsAtFirstStart(starts))
    dispatcher.start()
    end = time.monotonic() + 60
    while not dispatcher.is_ready():
        assert time.monotonic() < end
        time.sleep(0.01)
    dispatcher.stop()
    jobs.close()
    assert len(starts) == 2
    assert all(transport.ended.is_set() for transport in starts)


class NeverFinishes(HangsAtFirstStart):
    """A transport that is ready immediately and never finishes a job."""

    def __init__(self) -> None:
        super().__init__([])
        self.messages = [ModelsReady(())]

    def send(self, message: object) -> None:
        return


def test_a_worker_that_hangs_during_a_job_is_replaced(tmp_path: Path) -> None:
    settings = ServerSettings(models=(), data=tmp_path, limits=replace(ServerLimits(), hang_s=0.5))
    jobs, workers = JobStore(tmp_path), list[NeverFinishes]()
    jobs.submit({"seeds": [1], "output_format": "png"})

    def start_worker(_: ServerSettings) -> NeverFinishes:
        workers.append(NeverFinishes())
        return workers[-1]

    dispatcher = Dispatcher(settings, jobs, EventBus(), Metrics(jobs), start_worker)
    dispatcher.start()
    end = time.monotonic() + 60
    while len(workers) < 3:
        assert time.monotonic() < end, jobs.list()
        time.sleep(0.01)
    [job] = jobs.list()
    assert job.error is not None
    assert (job.state, job.attempts, job.error["code"]) == ("failed", 2, "worker_died"), "a job is retried only once"
    assert all(worker.ended.is_set() for worker in workers[:2])
    dispatcher.stop()
    jobs.close()


def test_a_job_survives_repeated_normal_shutdowns(tmp_path: Path) -> None:
    settings = ServerSettings(models=(), data=tmp_path)
    for number in range(3):
        jobs = JobStore(tmp_path)
        if number == 0:
            jobs.submit({"seeds": [1], "output_format": "png"})
        dispatcher = Dispatcher(settings, jobs, EventBus(), Metrics(jobs), lambda _: NeverFinishes())
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


def run_serve(*options: str, **environment: str) -> Any:
    command = [sys.executable, "-m", "anyaccel", "serve", *options]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, **environment}, check=False
    )


@pytest.mark.slow
def test_an_unusable_model_or_address_ends_with_an_error(tmp_path: Path) -> None:
    missing = run_serve(str(tmp_path / "none"), "--port", "0", "--data", str(tmp_path / "data"))
    assert (missing.returncode, "Traceback" in missing.stderr) == (3, False)
    assert "cannot start" in missing.stderr
    open_to_all = run_serve("--host", "0.0.0.0", "--data", str(tmp_path / "data"), ANYACCEL_API_KEYS="")
    assert open_to_all.returncode == 2
    assert "no API key" in open_to_all.stderr


def test_command_line_settings_are_parsed_and_checked() -> None:
    limits = read_limits(["max_steps=5", "deadline_s=1.5"], 7)
    assert (limits.max_steps, limits.deadline_s, limits.max_queue) == (5, 1.5, 7)
    for text, message in (
        ("steps=5", "unknown limit"),
        ("max_steps=many", "max_steps must be an integer"),
        ("max_n=-1", "max_n must be an integer"),
    ):
        with pytest.raises(UsageError, match=message):
            read_limits([text], 7)
    (first, second) = read_served_names(["embedded", "big=org/name"])
    assert (first.name, first.model, second.name, second.model) == ("embedded", "embedded", "big", "org/name")
    with pytest.raises(UsageError, match="duplicate model name"):
        read_served_names(["a=x", "a=y"])
    with pytest.raises(UsageError, match="not of the form NAME=PATH"):
        read_lora("ink")


def test_an_address_reachable_from_other_machines_requires_a_key() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.2", "example.org"):
        with pytest.raises(UsageError, match="no API key is set"):
            check_address(host, (), without_key=False)
        check_address(host, ("key",), without_key=False)
        check_address(host, (), without_key=True)
    for host in ("127.0.0.1", "localhost", "::1", "127.8.8.8"):
        check_address(host, (), without_key=False)
