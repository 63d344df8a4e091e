"""Device calls that hang: the watch, and a service that replaces a worker at its start and during a job."""

import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from anyaccel.server.jobs.dispatcher import Dispatcher
from anyaccel.server.jobs.events import EventBus
from anyaccel.server.jobs.metrics import Metrics
from anyaccel.server.jobs.store import JobStore
from anyaccel.server.settings import ServedName, ServerLimits, ServerSettings
from anyaccel.server.worker.device_watch import DeviceWatch
from anyaccel.server.worker.job_spec import JobSpec
from tests.conftest import NEEDS_RECIPES
from tests.server.worker.hanging_worker import HangingWorker


def measure_stalls(
    use_device: Callable[[], object], seconds: float = 1.0, until: Callable[[list[float]], bool] = lambda stalls: False
) -> list[float]:
    """Return the stalls that a watch measures while another thread uses the device, until a condition is true."""
    watch, started = DeviceWatch(), threading.Event()

    def run() -> None:
        with watch.using_device():
            started.set()
            use_device()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(60)
    end, stalls = time.monotonic() + seconds, list[float]()
    while time.monotonic() < end and not until(stalls):
        stalls.append(watch.measure_stall_s())
        time.sleep(0.05)
    return stalls


def has_ended(stalls: list[float]) -> bool:
    """Return whether a stall was followed by progress."""
    return any(later < earlier for earlier, later in itertools.pairwise(stalls))


def test_a_call_that_does_not_return_is_a_stall() -> None:
    reading, writing = os.pipe()
    stalls = measure_stalls(lambda: os.read(reading, 1))
    os.write(writing, b"x")
    assert stalls[-1] > 0.5
    assert stalls == sorted(stalls)
    for descriptor in (reading, writing):
        os.close(descriptor)


def test_a_lock_that_is_never_released_is_a_stall() -> None:
    event = threading.Event()
    assert measure_stalls(event.wait)[-1] > 0.5
    event.set()


def test_python_code_that_runs_is_progress() -> None:
    ending = threading.Event()

    def compute(depth: int = 0) -> None:
        while not ending.is_set():
            if depth < 40:
                compute(depth + 1)

    assert max(measure_stalls(compute)) < 0.5
    ending.set()


def test_a_busy_child_process_is_progress() -> None:
    """As a compiler that runs in its own process."""
    code = "import time\nend = time.monotonic() + 60\nwhile time.monotonic() < end: pass"
    with subprocess.Popen([sys.executable, "-c", code]) as child:
        # The first second of CPU time ends the stall; a busy test machine takes long for it.
        stalls = measure_stalls(child.wait, seconds=55, until=has_ended)
        child.kill()
    assert has_ended(stalls)


def test_a_thread_that_does_not_use_the_device_is_not_watched() -> None:
    watch = DeviceWatch()
    time.sleep(0.1)
    assert watch.measure_stall_s() == 0
    with watch.using_device(), watch.using_device():
        pass
    assert watch.measure_stall_s() == 0


@NEEDS_RECIPES
@pytest.mark.long
def test_a_worker_whose_device_hangs_is_replaced_and_its_job_runs_again(tmp_path: Path, folder: Path) -> None:
    limits = replace(ServerLimits(), hang_s=20.0)
    settings = ServerSettings(
        models=(ServedName("tiny", str(folder)),), data=tmp_path, device="cpu", dtype="float32", sizes=((64, 64),),
        max_batch=1, limits=limits,
    )  # fmt: skip
    jobs = JobStore(tmp_path)
    metrics = Metrics(jobs)
    dispatcher = Dispatcher(settings, jobs, EventBus(), metrics, HangingWorker)
    mark = tmp_path / "hang"
    mark.touch()  # the first worker hangs in its warm-up
    dispatcher.start()
    try:
        wait_for(dispatcher.is_ready)
        assert not mark.exists()
        assert 'anyaccel_worker_ends_total{reason="hang"} 1.0' in metrics.text().decode()
        mark.touch()
        spec = JobSpec(
            task="generate", model="tiny", prompt="a cat", seeds=(1,), width=64, height=64, num_inference_steps=2
        )
        job, _ = jobs.submit(spec.to_dict())
        dispatcher.wake()
        wait_for(lambda: jobs.count("done") == 1)
        assert not mark.exists()
        assert 'anyaccel_worker_ends_total{reason="hang"} 2.0' in metrics.text().decode()
        done = jobs.get(job.id)
        assert done is not None
        assert done.attempts == 2
    finally:
        dispatcher.stop()
        jobs.close()


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
