"""Pool of Ray Serve replicas, used instead of the service's local worker process.

Each image is one request to Ray Serve. If a replica dies, its images are generated again on another
replica, and their jobs continue.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from anyaccel.cluster.serve.applications import Application, Applications, DeploymentState
from anyaccel.cluster.serve.merged_facts import add_heartbeats, merge_facts
from anyaccel.cluster.serve.replica_load import REPLICA_LOAD, Shape, find_shape
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
    WorkerLost,
)

__all__ = ["ReplicaPool"]

_LOG = logging.getLogger(__name__)
_POLL_S = 0.25
# Time without an answer after which the cluster counts as lost.
_CLUSTER_TIMEOUT_S = 60.0
# Replica deaths while an image was running before the image fails: it may be the cause.
_MAX_DEATHS = 5


@dataclass
class _ImageTask:
    """One image of a job, sent to a replica as a separate request."""

    job: _PoolJob
    index: int
    run: RunJob
    """Message for the replica: a job with this image only."""
    shape: Shape
    deaths: int = 0
    previews: int = 0
    """Number of previews sent; a retry does not send them again."""
    stream: Any = None


@dataclass
class _PoolJob:
    """A job from the service, split into one task per image."""

    name: str
    tasks: list[_ImageTask] = field(default_factory=list)
    unfinished: int = 0
    error: JobFailed | None = None
    stopped: bool = False


class ReplicaPool:
    """`WorkerTransport` implementation that runs jobs on replicas in the connected Ray cluster."""

    self_healing = True

    def __init__(self, applications: Applications) -> None:
        self._applications = applications
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lock = threading.RLock()
        self._deploying = threading.Lock()
        self._jobs: dict[str, _PoolJob] = {}
        self._facts: dict[str, tuple[ModelFacts, ...]] = {}
        self._heartbeats: dict[str, Heartbeat] = {}
        self._apps: dict[str, int] = {}
        """Ready applications with the number of concurrent images per replica."""
        self._ended = self._broken = False
        self._status = ""

    def start(self) -> None:
        """Start a background thread that deploys the replicas and monitors them."""
        threading.Thread(target=self._monitor, name="replicas", daemon=True).start()

    def send(self, message: RunJob | CancelJob) -> None:
        """Start the job in a `RunJob` message, or cancel the job named in a `CancelJob` message."""
        if isinstance(message, CancelJob):
            with self._lock:
                job = self._jobs.get(message.job)
            if job is not None:
                self._stop(job)
            return
        try:
            job = _split(message)
        except OSError as error:
            self._inbox.put(
                JobFailed(message.job, "storage", f"cannot read the input images of the request: {error}", 500)
            )
            return
        with self._lock:
            self._jobs[job.name] = job
        for task in job.tasks:
            threading.Thread(target=self._run, args=(task,), name="task", daemon=True).start()

    def receive(self, timeout_s: float) -> Any:
        """Return the next message from any replica, or None if none arrives within `timeout_s` seconds.

        Raises EOFError after the pool has ended or the connection to the cluster is lost.
        """
        try:
            message = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if message is EOFError:
            raise EOFError
        return message

    def has_capacity(self, busy: int, images: int) -> bool:
        """Return whether the replicas can accept `images` more images while `busy` images are in progress.

        A job that is larger than the total capacity is accepted only if no images are in progress.
        """
        capacity = self._count_capacity()
        return capacity > 0 and (busy == 0 or busy + images <= capacity)

    def end(self) -> None:
        """Cancel all images in progress and delete the applications from the cluster."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            jobs = list(self._jobs.values())
        for job in jobs:
            self._stop(job)
        try:
            with self._deploying:
                self._applications.delete()
        except Exception as error:  # noqa: BLE001 - a lost cluster must not keep the service from ending
            _LOG.warning("anyaccel: some replicas may still be running in the cluster: %r", error)
        self._inbox.put(EOFError)

    def describe_end(self) -> str:
        """Return text for the log about how the pool ended, with the last known cluster status."""
        status = f" (last status: {self._status})" if self._status else ""
        return f"because the Ray cluster stopped responding{status}"

    # One image

    def _run(self, task: _ImageTask) -> None:
        try:
            outcome = self._generate(task)
        except Exception as error:  # noqa: BLE001 - a job must end even if this code has a bug
            _LOG.exception("anyaccel: failed to generate an image")
            outcome = JobFailed(task.job.name, "internal_error", f"{type(error).__name__}: {error}", 500)
        job = task.job
        with self._lock:
            job.unfinished -= 1
            job.error = job.error or outcome
            # Decided under the lock, so that exactly one thread reports the end of the job.
            last, failed = job.unfinished == 0, job.error is not None
            if last:
                self._jobs.pop(job.name, None)
        if last and not self._ended:
            if job.error is not None:
                self._inbox.put(job.error)
            elif job.stopped:
                self._inbox.put(JobStopped(job.name))
        elif failed:
            # The job fails as a whole, so its other images need not finish.
            self._stop(job)

    def _generate(self, task: _ImageTask) -> JobFailed | None:
        """Generate an image, trying another replica whenever one dies.

        Returns None if the image was generated or its job was canceled, and an error otherwise.
        """
        while not task.job.stopped:
            app = REPLICA_LOAD.choose_app(self._apps, task.shape)
            if app is None:
                time.sleep(_POLL_S)
                continue
            # A new name per attempt: the earlier one may still run on a replica that was only unreachable.
            task.run = replace(task.run, job=f"{task.job.name}#{task.index}#{task.deaths}")
            try:
                outcome = self._run_on_replica(task, self._applications.all[app])
            finally:
                replica = REPLICA_LOAD.release(task.run.job)
            if not isinstance(outcome, _ReplicaLost):
                return outcome
            self._report_loss(replica, outcome.reason)
            task.deaths += 1
            if task.deaths >= _MAX_DEATHS:
                message = f"{task.deaths} replicas died while generating this image"
                return JobFailed(task.job.name, "worker_died", message, 500)
        return None

    def _run_on_replica(self, task: _ImageTask, app: Application) -> JobFailed | _ReplicaLost | None:
        from ray.exceptions import RayError, RayTaskError, TaskCancelledError
        from ray.serve.exceptions import RayServeException, RequestCancelledError

        task.stream = app.handle.options(stream=True).generate.remote(task.run)
        # The job may have been stopped before `_stop` could see the stream.
        if task.job.stopped:
            task.stream.cancel()
        try:
            for messages in task.stream:
                for message in messages:
                    if isinstance(message, ImageDone | JobFailed | JobStopped | LoadFailed):
                        return self._finish(task, message)
                    self._forward(task, message)
        except (RequestCancelledError, TaskCancelledError):
            return None if task.job.stopped else _ReplicaLost("the request was canceled")
        except RayTaskError as error:
            return JobFailed(task.job.name, "internal_error", f"{type(error.cause).__name__}: {error.cause}", 500)
        except (RayError, RayServeException) as error:
            return _ReplicaLost(type(error).__name__)
        finally:
            task.stream = None
        return _ReplicaLost("the stream ended without a result")

    def _finish(
        self, task: _ImageTask, message: ImageDone | JobFailed | JobStopped | LoadFailed
    ) -> JobFailed | _ReplicaLost | None:
        if isinstance(message, ImageDone):
            self._forward(task, message)
        if isinstance(message, JobFailed):
            return replace(message, job=task.job.name)
        return _ReplicaLost(message.message) if isinstance(message, LoadFailed) else None

    def _forward(self, task: _ImageTask, message: Any) -> None:
        """Forward a message from a replica to the service under the original job ID."""
        if isinstance(message, Heartbeat):
            self._inbox.put(self._merge_heartbeat(REPLICA_LOAD.find_replica(task.run.job) or "", message))
            return
        if isinstance(message, PreviewImage):
            # A retried image starts again; the client already has its first previews.
            if message.number < task.previews:
                return
            task.previews = message.number + 1
        self._inbox.put(replace(message, job=task.job.name, index=task.index))

    def _merge_heartbeat(self, replica: str, heartbeat: Heartbeat) -> Heartbeat:
        running = {replica, *(name for app in self._apps for name in REPLICA_LOAD.list_replicas(app))}
        with self._lock:
            # Drops the heartbeats of dead replicas: their memory is free.
            latest = {name: last for name, last in self._heartbeats.items() if name in running}
            self._heartbeats = latest | {replica: heartbeat}
            return add_heartbeats(heartbeat, self._heartbeats.values())

    def _stop(self, job: _PoolJob) -> None:
        with self._lock:
            job.stopped = True
            streams = [task.stream for task in job.tasks if task.stream is not None]
        for stream in streams:
            stream.cancel()

    def _report_loss(self, replica: str | None, reason: str) -> None:
        if replica is not None and REPLICA_LOAD.mark_lost(replica):
            self._inbox.put(WorkerLost(replica, reason))

    # The replicas

    def _monitor(self) -> None:
        last_answer, ready, reported = time.monotonic(), False, -1
        try:
            # Holding the lock, `end` cannot delete the applications while they are being created.
            with self._deploying:
                if not self._ended:
                    self._applications.deploy()
        except Exception as error:  # noqa: BLE001 - whatever Ray raises, the service ends with this message
            self._inbox.put(LoadFailed(f"cannot start Ray Serve: {error}", "check the cluster with `ray status`"))
            return
        while not self._ended and not self._broken:
            try:
                ready = ready or self._load_facts()
                last_answer = time.monotonic()
            except Exception as error:  # noqa: BLE001 - a cluster may be slow for a while
                self._status = f"{type(error).__name__}: {error}"
                if time.monotonic() - last_answer > _CLUSTER_TIMEOUT_S:
                    self._inbox.put(EOFError)
                    return
            capacity = self._count_capacity()
            if ready and capacity != reported:
                reported = capacity
                self._inbox.put(self._make_ready_message(capacity))
            time.sleep(_POLL_S)

    def _make_ready_message(self, capacity: int) -> ModelsReady | NotReady:
        if not capacity:
            return NotReady("no replica is running; queued jobs start when one is ready")
        return ModelsReady(merge_facts([self._facts[app] for app in self._apps], capacity))

    def _load_facts(self) -> bool:
        """Request the model properties from each application that has a running replica.

        Returns whether the properties have been received from all applications.
        """
        states = self._applications.read_states()
        for name, app in self._applications.all.items():
            state = states[name]
            if name in self._facts:
                continue
            if not state.running and not state.failed:
                continue
            facts = _make_load_failed(app, state) if state.failed else app.request_facts(_CLUSTER_TIMEOUT_S)
            if isinstance(facts, LoadFailed):
                self._broken = True
                self._inbox.put(facts)
                return False
            self._facts[name] = facts
            self._apps[name] = min(app.group.max_concurrent, max(model.max_concurrent for model in facts))
        status = ", ".join(
            f"{app.group.device}: {states[name].message}" for name, app in self._applications.all.items()
        )
        if status != self._status:
            self._status = status
            self._inbox.put(LoadProgress(len(self._facts), len(self._applications.all), status))
        return len(self._facts) == len(self._applications.all)

    def _count_capacity(self) -> int:
        return sum(limit * len(REPLICA_LOAD.list_replicas(app)) for app, limit in list(self._apps.items()))


def _make_load_failed(app: Application, state: DeploymentState) -> LoadFailed:
    return LoadFailed(
        f"no replica could start on {app.group.device}: {state.message}",
        "see the replica logs in /tmp/ray/session_latest/logs/serve on the cluster nodes",
    )


@dataclass(frozen=True)
class _ReplicaLost:
    """Result for an image that was not finished because its replica was lost."""

    reason: str


def _split(message: RunJob) -> _PoolJob:
    """Split a job into tasks of one image each."""
    inputs = {name: _read(value) for name, value in message.inputs.items()}
    seeds: Sequence[int] = message.spec["seeds"]
    job = _PoolJob(message.job, unfinished=len(seeds))
    for index, seed in enumerate(seeds):
        spec: Mapping[str, Any] = {**message.spec, "seeds": [seed]}
        job.tasks.append(_ImageTask(job, index, RunJob(message.job, spec, inputs), find_shape(spec)))
    return job


def _read(value: str | bytes) -> bytes:
    """Return the content of an input image, reading the file if `value` is a path.

    The content is sent to the replicas, because those on other machines cannot read the file.
    """
    if isinstance(value, bytes):
        return value
    with open(value, "rb") as file:
        return file.read()
