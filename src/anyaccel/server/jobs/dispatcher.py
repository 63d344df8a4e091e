"""Dispatcher that sends jobs to a worker, records the outcomes and replaces a dead or hung worker."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from anyaccel.server.jobs.events import EventBus, JobEvent
from anyaccel.server.jobs.metrics import Metrics
from anyaccel.server.jobs.store import ENDED, Job, JobStore
from anyaccel.server.settings import ServerSettings, compute_max_in_flight
from anyaccel.server.worker.job_spec import SUFFIXES
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
    SavingProgress,
    StepDone,
    WorkerLost,
)
from anyaccel.server.worker.transport import WorkerProcess, WorkerTransport

__all__ = ["Dispatcher", "StartState"]

_LOG = logging.getLogger(__name__)
_POLL_S = 0.1
_CLEAN_UP_S = 30.0
_MAX_RESTART_DELAY_S = 30.0
# Consecutive starts without a ready worker after which the service gives up.
_MAX_FAILED_STARTS = 3
# Code, message and HTTP status of a job that misses its deadline.
_DEADLINE_ERROR = ("deadline_exceeded", "the deadline passed before the images were finished", 504)


@dataclass
class StartState:
    """Startup progress of the worker."""

    state: Literal["starting", "ready", "broken"] = "starting"
    done: int = 0
    total: int = 1
    message: str = "starting"
    hint: str = ""


@dataclass
class _DispatchedJob:
    """A job that was sent to the worker and has not ended, with its finished images."""

    job: Job
    images: dict[int, ImageDone] = field(default_factory=dict)
    """Finished images by index."""
    overdue_since: float | None = None
    """Monotonic time at which the job was cancelled because its deadline passed."""

    @property
    def image_count(self) -> int:
        return len(self.job.request["seeds"])


class Dispatcher:
    """Dispatcher that sends jobs to the worker and supervises it, in a thread of the service process.

    Each change to a job's state is stored before the job's subscribers are notified.
    """

    def __init__(
        self,
        settings: ServerSettings,
        jobs: JobStore,
        bus: EventBus,
        metrics: Metrics,
        make_transport: Callable[[ServerSettings], WorkerTransport] = WorkerProcess,
    ) -> None:
        self.settings, self.jobs, self.bus, self.metrics = settings, jobs, bus, metrics
        self.make_transport = make_transport
        self.start_state = StartState()
        self.models: dict[str, ModelFacts] = {}
        self.on_end: list[Callable[[Job], None]] = []
        self.lock = threading.RLock()
        self.running: dict[str, _DispatchedJob] = {}
        self.stopping = False
        self.started_at = time.time()
        # Heartbeats count as messages but not as progress: a worker with a stuck device still sends them.
        self.last_message = self.last_progress = time.monotonic()
        # From the last heartbeat: seconds without progress of the threads that use the device.
        self.stalled_s = 0.0
        # Moving average of the seconds per image, measured by the worker.
        self.image_seconds = 1.0
        self._transport: WorkerTransport | None = None
        # Jobs that ended but are still `running` in the store, for example because the disk was full.
        self._unrecorded: set[str] = set()
        self._thread = threading.Thread(target=self._supervise, name="dispatcher", daemon=True)

    def start(self) -> None:
        """Requeue the jobs that were running when the service last exited, and start supervising a worker."""
        for job in self.jobs.recover():
            self.bus.publish(job.id, JobEvent("state"))
        self._thread.start()

    def is_ready(self) -> bool:
        """Return whether the worker accepts jobs."""
        return self.start_state.state == "ready" and not self.stopping

    def wake(self) -> None:
        """Send queued jobs to the worker until it has no more capacity."""
        # HTTP threads call this too: without the lock, two threads could fill the same capacity.
        with self.lock:
            if self.start_state.state != "ready" or self._transport is None:
                return
            while (job := self.jobs.take(self._has_capacity, self._list_busy_models())) is not None:
                self.running[job.id] = _DispatchedJob(job)
                inputs = {name: str(path) for name, path in self.jobs.list_inputs(job).items()}
                self._transport.send(RunJob(job.id, job.request, inputs))
                self.bus.publish(job.id, JobEvent("state"))

    def cancel(self, job_id: str) -> Job:
        """Cancel a queued job immediately, or a running job at its next step."""
        previous = self.jobs.get(job_id)
        job = self.jobs.cancel(job_id)
        if job.state == "running":
            self._send(CancelJob(job_id))
        # Cancelling an ended job again must not count it twice in the metrics.
        elif previous is None or previous.state not in ENDED:
            self._notify_end(job)
        return job

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no job is queued or running; return False if that takes longer than `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if not self.jobs.count("queued") and not self.jobs.count("running"):
                return True
            time.sleep(_POLL_S)
        return False

    def stop(self) -> None:
        """Terminate the worker and requeue its jobs for the next start of the service.

        The interrupted attempts do not count toward the jobs' attempt limit.
        """
        self.stopping = True
        with self.lock:
            transport = self._transport
        if transport is not None:
            transport.end()  # ends the supervisor's `receive`; the supervisor then requeues the jobs
        if self._thread.is_alive():
            self._thread.join(10)

    def estimate_wait_s(self) -> float:
        """Estimate how many seconds a new request would wait in the queue."""
        # Assume the model with the least concurrency: a client should retry too late rather than too early.
        max_concurrent = max(1, min((model.max_concurrent for model in self.models.values()), default=1))
        return max(1.0, self.image_seconds * (self.jobs.count("queued") + 1) / max_concurrent)

    def _has_capacity(self, job: Job) -> bool:
        busy = sum(dispatched.image_count for dispatched in self.running.values())
        return self._transport is not None and self._transport.has_capacity(busy, len(job.request["seeds"]))

    def _list_busy_models(self) -> list[str]:
        """Return the models that run one call at a time and have one.

        Their next jobs wait in the queue, not in the worker: if the worker dies, only a running job loses an attempt.
        """
        capacities = {name: facts.max_concurrent for name, facts in self.models.items()}
        counts = Counter[str]()
        for dispatched in self.running.values():
            counts[dispatched.job.request.get("model", "")] += dispatched.image_count
        return [name for name, count in counts.items() if count >= compute_max_in_flight(capacities.get(name, 1))]

    def _send(self, message: CancelJob) -> None:
        with self.lock:
            if self._transport is not None:
                self._transport.send(message)

    # Worker lifecycle

    def _supervise(self) -> None:
        delay_s, failed_starts = 0.5, 0
        while not self.stopping:
            try:
                was_ready = self._run_transport()
            except Exception:  # noqa: BLE001 - for example a full disk: queued jobs run once it is fixed
                _LOG.exception("anyaccel: the dispatcher failed; restarting it")
                was_ready = True  # does not count as a failed start of the worker
            if self.stopping:
                break
            failed_starts = 0 if was_ready else failed_starts + 1
            if failed_starts >= _MAX_FAILED_STARTS or self.start_state.state == "broken":
                self.start_state.state = "broken"
                self.start_state.hint = self.start_state.hint or "see the output of the worker above"
                return
            delay_s = 0.5 if was_ready else min(_MAX_RESTART_DELAY_S, 2 * delay_s)
            time.sleep(delay_s)

    def _run_transport(self) -> bool:
        """Run one transport (a worker or a pool of workers) until it ends; return whether it became ready."""
        self.start_state = StartState(total=len(self.settings.models))
        self._requeue()  # again: the call in `_handle_worker_end` fails if the disk is full
        transport = self.make_transport(self.settings)
        with self.lock:
            self._transport = transport
        was_ready = False
        try:
            transport.start()
            was_ready = self._receive_messages(transport)
        finally:
            transport.end()
            self._handle_worker_end(transport, was_ready)
        return was_ready

    def _receive_messages(self, transport: WorkerTransport) -> bool:
        """Handle messages until the transport ends or hangs, or the service stops.

        Returns whether the transport became ready.
        """
        was_ready, cleaned_at = False, time.monotonic()
        self.last_message = self.last_progress = time.monotonic()
        self.stalled_s = 0.0
        while not self.stopping:
            try:
                message = transport.receive(_POLL_S)
            except EOFError:
                return was_ready
            if message is not None:
                self.last_message = time.monotonic()
                self._handle_safely(message)
                was_ready = was_ready or self.start_state.state == "ready"
            if not transport.self_healing and self._hangs():
                _LOG.error(
                    "anyaccel: the worker made no progress for %.0f s; replacing it", self.settings.limits.hang_s
                )
                self.metrics.worker_ends.labels("hang").inc()
                return was_ready
            clean_up_due = time.monotonic() - cleaned_at > _CLEAN_UP_S
            cleaned_at = time.monotonic() if clean_up_due else cleaned_at
            try:
                self._clean_up() if clean_up_due else self._cancel_overdue_jobs()
            except Exception:  # noqa: BLE001 - a full disk must not stop the worker; the next pass retries
                _LOG.exception("anyaccel: failed to delete expired jobs or cancel overdue ones")
        return was_ready

    def _handle_safely(self, message: Any) -> None:
        """Handle a message; log an exception instead of raising it."""
        try:
            self._handle(message)
        except Exception:  # noqa: BLE001 - one bad message must not stop the service
            _LOG.exception("anyaccel: failed to handle a %s message from the worker", type(message).__name__)
            if isinstance(message, ImageDone | JobFailed | JobStopped):
                self._unrecorded.add(message.job)  # `_clean_up` marks the job as failed

    def _clean_up(self) -> None:
        limits = self.settings.limits
        for job_id in list(self._unrecorded):
            self._end(self._fail(job_id, "storage", "cannot store the result; see the service log", 500))
            self._unrecorded.discard(job_id)  # only after `_fail`, which raises while the disk is full
        self.jobs.expire(older_than_s=limits.keep_s, max_bytes=limits.keep_bytes)

    def _hangs(self) -> bool:
        """Return whether the worker has hung for `hang_s` seconds.

        It then sends no message, or its heartbeats report that the device makes no progress, or it does not stop a job
        whose deadline has passed and reports no step of another job either.
        """
        now, hang_s = time.monotonic(), self.settings.limits.hang_s
        with self.lock:
            overdue = [job.overdue_since for job in self.running.values() if job.overdue_since is not None]
            return (
                now - self.last_message > hang_s
                or self.stalled_s > hang_s
                or (bool(overdue) and now - max(self.last_progress, min(overdue)) > hang_s)
            )

    def _handle_worker_end(self, transport: WorkerTransport, was_ready: bool) -> None:
        with self.lock:
            self._transport = None
            self.running.clear()
            if not self.stopping and self.start_state.state != "broken":
                self.start_state = StartState(message="the worker exited and is being restarted")
        if self.stopping:
            self._requeue(count_attempt=False)
            return
        if was_ready:
            _LOG.error("anyaccel: the worker exited %s; restarting it", transport.describe_end())
            self.metrics.worker_ends.labels("death").inc()
        self._requeue()

    def _requeue(self, *, count_attempt: bool = True) -> None:
        """Requeue all running jobs, and fail those that have no attempts left.

        Must not be called while a worker is running. With `count_attempt=False`, the interrupted attempt
        does not count toward the attempt limit.
        """
        for job in self.jobs.requeue(count_attempt=count_attempt):
            self.bus.forget(job.id)
            self._notify_end(job) if job.state in ENDED else self.bus.publish(job.id, JobEvent("state"))

    # Messages from the worker

    def _handle(self, message: Any) -> None:
        if isinstance(message, Heartbeat):
            self.metrics.record_heartbeat(message)
            self.stalled_s = message.stalled_s
            return
        self.last_progress = time.monotonic()
        if isinstance(message, LoadProgress):
            self.start_state.done, self.start_state.total = message.done, message.total
            self.start_state.message = message.message
        elif isinstance(message, ModelsReady):
            self.models = {facts.name: facts for facts in message.models}
            self.start_state.state, self.start_state.message = "ready", "ready"
            self.wake()
        elif isinstance(message, LoadFailed):
            self.start_state = StartState("broken", message=message.message, hint=message.hint)
        elif isinstance(message, NotReady):
            self.start_state = StartState(message=message.message)
        elif isinstance(message, WorkerLost):
            _LOG.error("anyaccel: worker %s exited: %s", message.worker, message.message)
            self.metrics.worker_ends.labels("death").inc()
        else:
            with self.lock:
                dispatched = self.running.get(message.job)
            # Drop late messages of a job that has ended or was requeued.
            if dispatched is not None:
                self._handle_job_message(dispatched, message)

    def _handle_job_message(self, dispatched: _DispatchedJob, message: Any) -> None:
        job_id = dispatched.job.id
        if isinstance(message, StepDone):
            self.metrics.step_seconds.observe(message.seconds)
            self.bus.publish(job_id, JobEvent("step", message.index, message.done, message.total))
        elif isinstance(message, SavingProgress):
            self.bus.publish(job_id, JobEvent("save", message.index, message.done, message.total))
        elif isinstance(message, PreviewImage):
            self.bus.publish(job_id, JobEvent("preview", message.index, number=message.number, content=message.content))
        elif isinstance(message, ImageDone):
            dispatched.images[message.index] = message
            self.metrics.images.inc()
            self.image_seconds = 0.8 * self.image_seconds + 0.2 * message.seconds
            # The last image ends the job, so it has no event of its own.
            if len(dispatched.images) == dispatched.image_count:
                self._finish(dispatched)
            else:
                self.bus.publish(job_id, JobEvent("made", message.index, content=message.content))
        elif isinstance(message, JobFailed):
            self._end(self._fail(job_id, message.code, message.message, message.status))
        elif isinstance(message, JobStopped):
            if dispatched.overdue_since is not None:
                self._end(self._fail(job_id, *_DEADLINE_ERROR))
            else:
                self._end(self.jobs.stop(job_id))

    def _finish(self, dispatched: _DispatchedJob) -> None:
        images = [dispatched.images[index] for index in sorted(dispatched.images)]
        suffix = SUFFIXES[dispatched.job.request["output_format"]]
        files = [(f"{image.index}{suffix}", image.content) for image in images]
        files += [(f"{image.index}.{name}", content) for image in images for name, content in image.files.items()]
        image_records = [
            {
                **({"width": image.width, "height": image.height} if image.width else {}),
                "seed": image.seed,
                "seconds": image.seconds,
                **image.details,
            }
            for image in images
        ]
        try:
            job = self.jobs.finish(dispatched.job.id, files, {"images": image_records})
        except (OSError, sqlite3.Error):
            _LOG.exception("anyaccel: failed to store the result of %s", dispatched.job.id)
            job = self._fail(dispatched.job.id, "storage", "cannot store the result; the disk may be full", 500)
        self._end(job)

    def _fail(self, job_id: str, code: str, message: str, status: int) -> Job:
        return self.jobs.fail(job_id, {"code": code, "message": message, "status": status})

    def _end(self, job: Job) -> None:
        with self.lock:
            self.running.pop(job.id, None)
        self._notify_end(job)
        self.wake()

    def _notify_end(self, job: Job) -> None:
        self.bus.forget(job.id)
        for callback in self.on_end:
            callback(job)
        self.bus.publish(job.id, JobEvent("state"))

    def _cancel_overdue_jobs(self) -> None:
        """Fail jobs that have exceeded their deadline; running jobs are stopped at their next step first.

        The deadline is measured from the time the job was accepted or the service started, whichever is
        later.
        """
        now, limits = time.time(), self.settings.limits
        deadlines = {"image": limits.deadline_s, "video": limits.video_deadline_s, "audio": limits.video_deadline_s}
        # Requeued jobs are often older than the deadline: a restart gives them the full time again.
        if now - self.started_at < min(deadlines.values()):
            return
        for job in self.jobs.overdue(now - min(deadlines.values())):
            if now - max(job.created, self.started_at) < deadlines[job.request.get("kind", "image")]:
                continue
            if job.state == "queued":
                self._notify_end(self._fail(job.id, *_DEADLINE_ERROR))
                continue
            with self.lock:
                dispatched = self.running.get(job.id)
                if dispatched is None or dispatched.overdue_since is not None:
                    continue
                dispatched.overdue_since = time.monotonic()  # the job fails when the worker confirms with `JobStopped`
            self._send(CancelJob(job.id))
