"""The dispatcher: gives jobs to a worker, hears what becomes of them, and replaces a worker that died or hangs."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from anyaccel.server.jobs.events import EventBus, JobEvent
from anyaccel.server.jobs.metrics import Metrics
from anyaccel.server.jobs.store import ENDED, Job, JobStore
from anyaccel.server.settings import ServerSettings
from anyaccel.server.worker.messages import (
    CancelJob,
    Heartbeat,
    ImageDone,
    JobFailed,
    JobStopped,
    LoadFailed,
    LoadProgress,
    ModelFacts,
    ModelsReady,
    NotReady,
    PreviewImage,
    RunJob,
    StepDone,
    WorkerLost,
)
from anyaccel.server.worker.worker_process import WorkerProcess, WorkerTransport

__all__ = ["Dispatcher", "StartState"]

_LOG = logging.getLogger(__name__)
_TICK_S = 0.1
_TIDY_S = 30.0
_LONGEST_PAUSE_S = 30.0
_STARTS = 3
"""A worker that never was ready is started so often before the service gives up."""


@dataclass
class StartState:
    """How far the start of the worker is."""

    state: Literal["starting", "ready", "broken"] = "starting"
    done: int = 0
    total: int = 1
    words: str = "starting"
    hint: str = ""


@dataclass
class _DispatchedJob:
    """A job that the worker has."""

    job: Job
    made: dict[int, ImageDone] = field(default_factory=dict)
    late: bool = False
    """Whether it is stopped because its time is over."""

    @property
    def pictures(self) -> int:
        return len(self.job.request["seeds"])


class Dispatcher:
    """Runs in threads of the service; whatever it is told, the jobs' own state is changed first."""

    def __init__(
        self,
        settings: ServerSettings,
        jobs: JobStore,
        bus: EventBus,
        metrics: Metrics,
        make_workplace: Callable[[ServerSettings], WorkerTransport] = WorkerProcess,
    ) -> None:
        self.settings, self.jobs, self.bus, self.metrics = settings, jobs, bus, metrics
        self.make_workplace = make_workplace
        self.start_state = StartState()
        self.models: dict[str, ModelFacts] = {}
        self.on_end: list[Callable[[Job], None]] = []
        self.lock = threading.RLock()
        self.running: dict[str, _DispatchedJob] = {}
        self.stopping = False
        self.begun = time.time()
        self.last_word = self.last_sign = time.monotonic()
        """When the worker last said anything, and when it last came forward."""
        self.seconds = 1.0
        """What a picture takes, about."""
        self._workplace: WorkerTransport | None = None
        self._unended: set[str] = set()
        """Jobs of which the end could not be kept: on a full disk, say."""
        self._thread = threading.Thread(target=self._supervise, name="dispatcher", daemon=True)

    def start(self) -> None:
        """Put back what was running when the service last ended, and start the worker."""
        for job in self.jobs.recover():
            self.bus.publish(job.id, JobEvent("state"))
        self._thread.start()

    def is_ready(self) -> bool:
        """Whether pictures are made now."""
        return self.start_state.state == "ready" and not self.stopping

    def wake(self) -> None:
        """Give the worker what it has room for."""
        with self.lock:
            if self.start_state.state != "ready" or self._workplace is None:
                return
            while (job := self.jobs.take(self._has_room)) is not None:
                self.running[job.id] = _DispatchedJob(job)
                self.last_sign = time.monotonic()
                inputs = {name: str(path) for name, path in self.jobs.list_inputs(job).items()}
                self._workplace.send(RunJob(job.id, job.request, inputs))
                self.bus.publish(job.id, JobEvent("state"))

    def cancel(self, name: str) -> Job:
        """Stop a job: at once where it waits, at its next step where it runs."""
        before = self.jobs.get(name)
        job = self.jobs.cancel(name)
        if job.state == "running":
            self._send(CancelJob(name))
        elif before is None or before.state not in ENDED:
            self._tell_end(job)
        return job

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no job waits or runs; whether that came about."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if not self.jobs.count("queued") and not self.jobs.count("running"):
                return True
            time.sleep(_TICK_S)
        return False

    def stop(self) -> None:
        """End the worker; jobs that it had wait for the next start, and this attempt of theirs does not count."""
        self.stopping = True
        with self.lock:
            workplace = self._workplace
        if workplace is not None:
            workplace.end()
        if self._thread.is_alive():
            self._thread.join(10)

    def guess_wait_s(self) -> float:
        """How long a request that comes now would wait, about."""
        at_once = max(1, min((model.at_once for model in self.models.values()), default=1))
        return max(1.0, self.seconds * (self.jobs.count("queued") + 1) / at_once)

    def _has_room(self, job: Job) -> bool:
        busy = sum(one.pictures for one in self.running.values())
        return self._workplace is not None and self._workplace.has_room(busy, len(job.request["seeds"]))

    def _send(self, message: CancelJob) -> None:
        with self.lock:
            if self._workplace is not None:
                self._workplace.send(message)

    # The worker's life

    def _supervise(self) -> None:
        pause, failed_starts = 0.5, 0
        while not self.stopping:
            try:
                was_ready = self._run_one()
            except Exception:  # noqa: BLE001 - a disk that is full, say: what waits is still there when it is not
                _LOG.exception("anyaccel: the dispatcher failed, and begins anew")
                was_ready = True
            if self.stopping:
                break
            failed_starts = 0 if was_ready else failed_starts + 1
            if failed_starts >= _STARTS or self.start_state.state == "broken":
                self.start_state.state = "broken"
                self.start_state.hint = self.start_state.hint or "the worker's own messages are above"
                return
            pause = 0.5 if was_ready else min(_LONGEST_PAUSE_S, 2 * pause)
            time.sleep(pause)

    def _run_one(self) -> bool:
        """One worker or pool of them, from its start to its end; whether it was ready."""
        self.start_state = StartState(total=len(self.settings.models))
        self._put_back()  # where that failed when the last one ended
        workplace = self.make_workplace(self.settings)
        with self.lock:
            self._workplace = workplace
        was_ready = False
        try:
            workplace.start()
            was_ready = self._listen(workplace)
        finally:
            workplace.end()
            self._end_of_worker(workplace, was_ready)
        return was_ready

    def _listen(self, workplace: WorkerTransport) -> bool:
        was_ready, tidied = False, time.monotonic()
        self.last_word = self.last_sign = time.monotonic()
        while not self.stopping:
            try:
                said = workplace.hear(_TICK_S)
            except EOFError:
                return was_ready
            if said is not None:
                self.last_word = time.monotonic()
                self._hear_safely(said)
                was_ready = was_ready or self.start_state.state == "ready"
            if not workplace.heals and self._hangs():
                _LOG.error("anyaccel: the worker hung for %.0f s, and is replaced", self.settings.limits.hang_s)
                self.metrics.worker_ends.labels("hang").inc()
                return was_ready
            tidies = time.monotonic() - tidied > _TIDY_S
            tidied = time.monotonic() if tidies else tidied
            try:
                self._tidy() if tidies else self._end_late_jobs()
            except Exception:  # noqa: BLE001 - a disk that is full must not cost the worker, and is looked at again
                _LOG.exception("anyaccel: jobs could not be tidied")
        return was_ready

    def _hear_safely(self, said: Any) -> None:
        """Whatever goes wrong with one message, the next one is heard; a job that cannot be ended is ended later."""
        try:
            self._hear(said)
        except Exception:  # noqa: BLE001 - a fault in one must not end the service
            _LOG.exception("anyaccel: %s was not taken in", type(said).__name__)
            if isinstance(said, ImageDone | JobFailed | JobStopped):
                self._unended.add(said.job)

    def _tidy(self) -> None:
        limits = self.settings.limits
        for name in list(self._unended):
            self._end(self._fail(name, "storage", "the result could not be kept", 500))
            self._unended.discard(name)
        self.jobs.expire(older_than_s=limits.keep_s, most_bytes=limits.keep_bytes)

    def _hangs(self) -> bool:
        """Whether it said nothing for long, at its start or later, or works and took no step."""
        with self.lock:
            since = self.last_sign if self.running else self.last_word
            return time.monotonic() - min(since, self.last_word) > self.settings.limits.hang_s

    def _end_of_worker(self, workplace: WorkerTransport, was_ready: bool) -> None:
        with self.lock:
            self._workplace = None
            self.running.clear()
            if not self.stopping and self.start_state.state != "broken":
                self.start_state = StartState(words="the worker ended, and is started again")
        if self.stopping:
            self._put_back(count_attempt=False)
            return
        if was_ready:
            _LOG.error("anyaccel: the worker ended %s, and is started again", workplace.describe_end())
            self.metrics.worker_ends.labels("death").inc()
        self._put_back()

    def _put_back(self, *, count_attempt: bool = True) -> None:
        """No worker is there: what was running waits again, or has ended."""
        for job in self.jobs.requeue(count_attempt=count_attempt):
            self.bus.forget(job.id)
            self._tell_end(job) if job.state in ENDED else self.bus.publish(job.id, JobEvent("state"))

    # What the worker says

    def _hear(self, said: Any) -> None:
        if isinstance(said, Heartbeat):
            self.metrics.note_beat(said)
            return
        self.last_sign = time.monotonic()
        if isinstance(said, LoadProgress):
            self.start_state.done, self.start_state.total = said.done, said.total
            self.start_state.words = said.words
        elif isinstance(said, ModelsReady):
            self.models = {facts.name: facts for facts in said.models}
            self.start_state.state, self.start_state.words = "ready", "ready"
            self.wake()
        elif isinstance(said, LoadFailed):
            self.start_state = StartState("broken", words=said.message, hint=said.hint)
        elif isinstance(said, NotReady):
            self.start_state = StartState(words=said.words)
        elif isinstance(said, WorkerLost):
            _LOG.error("anyaccel: the worker %s ended: %s", said.worker, said.words)
            self.metrics.worker_ends.labels("death").inc()
        else:
            with self.lock:
                running = self.running.get(said.job)
            if running is not None:
                self._hear_of_job(running, said)

    def _hear_of_job(self, running: _DispatchedJob, said: Any) -> None:
        if isinstance(said, StepDone):
            self.metrics.step_seconds.observe(said.seconds)
            self.bus.publish(said.job, JobEvent("step", said.picture, said.done, said.total))
        elif isinstance(said, PreviewImage):
            self.bus.publish(said.job, JobEvent("preview", said.picture, number=said.number, content=said.content))
        elif isinstance(said, ImageDone):
            running.made[said.picture] = said
            self.metrics.images.inc()
            self.seconds = 0.8 * self.seconds + 0.2 * said.seconds
            if len(running.made) == running.pictures:
                self._finish(running)
            else:
                self.bus.publish(said.job, JobEvent("made", said.picture, content=said.content))
        elif isinstance(said, JobFailed):
            self._end(self._fail(said.job, said.code, said.message, said.status))
        elif isinstance(said, JobStopped):
            if running.late:
                self._end(self._fail(said.job, *_LATE))
            else:
                self._end(self.jobs.stop(said.job))

    def _finish(self, running: _DispatchedJob) -> None:
        made = [running.made[place] for place in sorted(running.made)]
        suffix = {"jpeg": "jpg"}.get(running.job.request["output_format"], running.job.request["output_format"])
        files = [(f"{one.picture}.{suffix}", one.content) for one in made]
        pictures = [
            {"width": one.width, "height": one.height, "seed": one.seed, "seconds": one.seconds} for one in made
        ]
        try:
            job = self.jobs.finish(running.job.id, files, {"pictures": pictures})
        except (OSError, sqlite3.Error):
            _LOG.exception("anyaccel: a result cannot be kept")
            job = self._fail(running.job.id, "storage", "the result cannot be kept: is the disk full?", 500)
        self._end(job)

    def _fail(self, name: str, code: str, message: str, status: int) -> Job:
        return self.jobs.fail(name, {"code": code, "message": message, "status": status})

    def _end(self, job: Job) -> None:
        with self.lock:
            self.running.pop(job.id, None)
        self._tell_end(job)
        self.wake()

    def _tell_end(self, job: Job) -> None:
        self.bus.forget(job.id)
        for hear in self.on_end:
            hear(job)
        self.bus.publish(job.id, JobEvent("state"))

    def _end_late_jobs(self) -> None:
        """A job has so much time from when it was accepted, or from the service's start where that was later."""
        now = time.time()
        if now - self.begun < self.settings.limits.deadline_s:
            return
        for job in self.jobs.overdue(now - self.settings.limits.deadline_s):
            if job.state == "queued":
                self._tell_end(self._fail(job.id, *_LATE))
                continue
            with self.lock:
                running = self.running.get(job.id)
                if running is None or running.late:
                    continue
                running.late = True
            self._send(CancelJob(job.id))


_LATE = ("deadline_exceeded", "the picture was not made in time", 504)
