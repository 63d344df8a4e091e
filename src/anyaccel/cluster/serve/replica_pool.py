"""A pool of replicas in the place of a service's one worker: each picture is one request to Ray Serve.

A picture whose replica dies is asked for again, of another one; its job never hears of it.
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
from anyaccel.cluster.serve.replica_load import BOARD, Shape, find_shape
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
_LOOK_S = 0.25
_SILENT_S = 60.0
"""A cluster that answers nothing for so long is gone."""
_MOST_DEATHS = 5
"""A picture that so many replicas died with is not tried again: it may be what kills them."""


@dataclass
class _ImageTask:
    """One picture of a job, until it is made."""

    job: _PoolJob
    index: int
    run: RunJob
    """What a replica is sent: a job with this one picture."""
    shape: Shape
    deaths: int = 0
    previews: int = 0
    """How many were told: what is made again shows none twice."""
    stream: Any = None


@dataclass
class _PoolJob:
    name: str
    errands: list[_ImageTask] = field(default_factory=list)
    left: int = 0
    error: JobFailed | None = None
    stopped: bool = False


class ReplicaPool:
    """A `WorkerTransport` on a cluster that was joined."""

    self_healing = True

    def __init__(self, applications: Applications) -> None:
        self._applications = applications
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lock = threading.RLock()
        self._deploying = threading.Lock()
        self._jobs: dict[str, _PoolJob] = {}
        self._facts: dict[str, tuple[ModelFacts, ...]] = {}
        self._beats: dict[str, Heartbeat] = {}
        self._apps: dict[str, int] = {}
        """The applications that are ready, with the pictures that a replica of each makes at once."""
        self._ended = self._broken = False
        self._words = ""

    def start(self) -> None:
        """Ask Serve for the replicas, and watch them."""
        threading.Thread(target=self._watch, name="replicas", daemon=True).start()

    def send(self, message: RunJob | CancelJob) -> None:
        """Begin with a job, or stop it."""
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
                JobFailed(message.job, "storage", f"what came with the request cannot be read: {error}", 500)
            )
            return
        with self._lock:
            self._jobs[job.name] = job
        for errand in job.errands:
            threading.Thread(target=self._run, args=(errand,), name="errand", daemon=True).start()

    def receive(self, timeout_s: float) -> Any:
        """What replicas tell, in the order in which it comes."""
        try:
            said = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if said is EOFError:
            raise EOFError
        return said

    def has_room(self, busy: int, pictures: int) -> bool:
        """As many as all replicas make at once; what is more waits in the service, where turns are fair."""
        room = self._count_room()
        return room > 0 and (busy == 0 or busy + pictures <= room)

    def end(self) -> None:
        """Stop all pictures, and take the applications out of the cluster."""
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
        except Exception as error:  # noqa: BLE001 - a cluster that is gone must not keep the service from ending
            _LOG.warning("anyaccel: replicas may be left in the cluster: %r", error)
        self._inbox.put(EOFError)

    def describe_end(self) -> str:
        """What is known of it."""
        return f"with its cluster: {self._words}" if self._words else "with its cluster"

    # One picture

    def _run(self, errand: _ImageTask) -> None:
        try:
            outcome = self._make(errand)
        except Exception as error:  # noqa: BLE001 - a fault here must not leave a job without an end
            _LOG.exception("anyaccel: a picture was given up")
            outcome = JobFailed(errand.job.name, "internal_error", f"{type(error).__name__}: {error}", 500)
        job = errand.job
        with self._lock:
            job.left -= 1
            job.error = job.error or outcome
            last, failed = job.left == 0, job.error is not None
            if last:
                self._jobs.pop(job.name, None)
        if last and not self._ended:
            if job.error is not None:
                self._inbox.put(job.error)
            elif job.stopped:
                self._inbox.put(JobStopped(job.name))
        elif failed:
            self._stop(job)

    def _make(self, errand: _ImageTask) -> JobFailed | None:
        """Ask replicas until one has made it; None where that, or its stop, came about."""
        while not errand.job.stopped:
            app = BOARD.choose(self._apps, errand.shape)
            if app is None:
                time.sleep(_LOOK_S)
                continue
            errand.run = replace(errand.run, job=f"{errand.job.name}#{errand.index}#{errand.deaths}")
            try:
                outcome = self._ask(errand, self._applications.all[app])
            finally:
                replica = BOARD.take_off(errand.run.job)
            if not isinstance(outcome, _Lost):
                return outcome
            self._note_loss(replica, outcome.words)
            errand.deaths += 1
            if errand.deaths >= _MOST_DEATHS:
                words = f"{errand.deaths} replicas ended while they made this picture"
                return JobFailed(errand.job.name, "worker_died", words, 500)
        return None

    def _ask(self, errand: _ImageTask, app: Application) -> JobFailed | _Lost | None:
        from ray.exceptions import RayError, RayTaskError, TaskCancelledError
        from ray.serve.exceptions import RayServeException, RequestCancelledError

        errand.stream = app.handle.options(stream=True).make.remote(errand.run)
        if errand.job.stopped:
            errand.stream.cancel()
        try:
            for told in errand.stream:
                for said in told:
                    if isinstance(said, ImageDone | JobFailed | JobStopped | LoadFailed):
                        return self._conclude(errand, said)
                    self._pass_on(errand, said)
        except (RequestCancelledError, TaskCancelledError):
            return None if errand.job.stopped else _Lost("it was cancelled")
        except RayTaskError as error:
            return JobFailed(errand.job.name, "internal_error", f"{type(error.cause).__name__}: {error.cause}", 500)
        except (RayError, RayServeException) as error:
            return _Lost(type(error).__name__)
        finally:
            errand.stream = None
        return _Lost("it said nothing to the end")

    def _conclude(
        self, errand: _ImageTask, said: ImageDone | JobFailed | JobStopped | LoadFailed
    ) -> JobFailed | _Lost | None:
        if isinstance(said, ImageDone):
            self._pass_on(errand, said)
        if isinstance(said, JobFailed):
            return replace(said, job=errand.job.name)
        return _Lost(said.message) if isinstance(said, LoadFailed) else None

    def _pass_on(self, errand: _ImageTask, said: Any) -> None:
        if isinstance(said, Heartbeat):
            self._inbox.put(self._note_beat(BOARD.find(errand.run.job) or "", said))
            return
        if isinstance(said, PreviewImage):
            if said.number < errand.previews:
                return
            errand.previews = said.number + 1
        self._inbox.put(replace(said, job=errand.job.name, index=errand.index))

    def _note_beat(self, replica: str, beat: Heartbeat) -> Heartbeat:
        living = {replica, *(one for app in self._apps for one in BOARD.list_replicas(app))}
        with self._lock:
            self._beats = {name: last for name, last in self._beats.items() if name in living} | {replica: beat}
            return add_heartbeats(beat, self._beats.values())

    def _stop(self, job: _PoolJob) -> None:
        with self._lock:
            job.stopped = True
            streams = [errand.stream for errand in job.errands if errand.stream is not None]
        for stream in streams:
            stream.cancel()

    def _note_loss(self, replica: str | None, words: str) -> None:
        if replica is not None and BOARD.lose(replica):
            self._inbox.put(WorkerLost(replica, words))

    # The replicas

    def _watch(self) -> None:
        answered, ready, told = time.monotonic(), False, -1
        try:
            with self._deploying:
                if not self._ended:
                    self._applications.deploy()
        except Exception as error:  # noqa: BLE001 - whatever Ray raises, the service ends with its words
            self._inbox.put(LoadFailed(f"Ray Serve cannot start: {error}", "look at the cluster with `ray status`"))
            return
        while not self._ended and not self._broken:
            try:
                ready = ready or self._look_for_facts()
                answered = time.monotonic()
            except Exception as error:  # noqa: BLE001 - a cluster may be slow for a while
                self._words = f"{type(error).__name__}: {error}"
                if time.monotonic() - answered > _SILENT_S:
                    self._inbox.put(EOFError)
                    return
            room = self._count_room()
            if ready and room != told:
                told = room
                self._inbox.put(self._describe(room))
            time.sleep(_LOOK_S)

    def _describe(self, room: int) -> ModelsReady | NotReady:
        if not room:
            return NotReady("no replica is there now; what waits is made as soon as one is")
        return ModelsReady(merge_facts([self._facts[app] for app in self._apps], room))

    def _look_for_facts(self) -> bool:
        """Ask each application that has a replica for its plans; whether all have answered."""
        states = self._applications.look()
        for name, app in self._applications.all.items():
            state = states[name]
            if name in self._facts:
                continue
            if not state.running and not state.failed:
                continue
            found = _describe_failure(app, state) if state.failed else app.ask_for_facts(_SILENT_S)
            if isinstance(found, LoadFailed):
                self._broken = True
                self._inbox.put(found)
                return False
            self._facts[name] = found
            self._apps[name] = min(app.kind.at_once, max(facts.at_once for facts in found))
        words = ", ".join(f"{app.kind.device}: {states[name].words}" for name, app in self._applications.all.items())
        if words != self._words:
            self._words = words
            self._inbox.put(LoadProgress(len(self._facts), len(self._applications.all), words))
        return len(self._facts) == len(self._applications.all)

    def _count_room(self) -> int:
        return sum(most * len(BOARD.list_replicas(app)) for app, most in list(self._apps.items()))


def _describe_failure(app: Application, state: DeploymentState) -> LoadFailed:
    return LoadFailed(f"no replica can start on {app.kind.device}: {state.words}", "its own log is among those of Ray")


@dataclass(frozen=True)
class _Lost:
    """A replica did not end what it began."""

    words: str


def _split(message: RunJob) -> _PoolJob:
    """A job as errands of one picture each."""
    inputs = {name: _read(given) for name, given in message.inputs.items()}
    seeds: Sequence[int] = message.work["seeds"]
    job = _PoolJob(message.job, left=len(seeds))
    for index, seed in enumerate(seeds):
        work: Mapping[str, Any] = {**message.work, "seeds": [seed]}
        job.errands.append(_ImageTask(job, index, RunJob(message.job, work, inputs), find_shape(work)))
    return job


def _read(given: str | bytes) -> bytes:
    if isinstance(given, bytes):
        return given
    with open(given, "rb") as file:
        return file.read()
