"""A crew: the workers of a batch as the one who leads it sees them, and the one of this machine's processes."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from anyaccel.cluster.batch.image_worker import ImageWorker, RowFailed, RowImage, WorkerFacts, WorkerSettings
from anyaccel.cluster.batch.rows import BatchRow
from anyaccel.errors import AnyaccelError
from anyaccel.library_logging import quiet_libraries
from anyaccel.processes.pipe_worker import ParentPipe, PipeWorker, wait_for_messages

__all__ = ["Event", "LocalWorkerPool", "RowsFinished", "WorkerDied", "WorkerPool", "WorkerStartFailed", "WorkerStarted"]

_END_S = 5.0


@dataclass(frozen=True)
class WorkerStarted:
    """A worker has its model."""

    worker: int
    facts: WorkerFacts


@dataclass(frozen=True)
class RowsFinished:
    """A worker has done the first of what it was given."""

    worker: int
    outcomes: list[RowImage | RowFailed]


@dataclass(frozen=True)
class WorkerStartFailed:
    """A worker cannot have its model, and says why."""

    worker: int
    error: AnyaccelError


@dataclass(frozen=True)
class WorkerDied:
    """A worker is gone, with all that it had to do."""

    worker: int
    reason: str


Event: TypeAlias = WorkerStarted | RowsFinished | WorkerStartFailed | WorkerDied


class WorkerPool(Protocol):
    """Workers by number; each does what it is given in turn."""

    def start(self, worker: int, settings: WorkerSettings) -> None:
        """Let a worker begin to load its model; one of that number that is gone is replaced."""

    def give(self, worker: int, rows: Sequence[BatchRow]) -> None:
        """Give a worker rows of one shape to make."""

    def wait(self, seconds: float) -> list[Event]:
        """What has happened, or nothing after so many seconds."""

    def stop(self) -> None:
        """End all workers at once."""


class LocalWorkerPool:
    """A process a worker, each at the end of a pipe."""

    def __init__(self) -> None:
        self._workers: dict[int, PipeWorker] = {}

    def start(self, worker: int, settings: WorkerSettings) -> None:
        """Start a process."""
        threads = {} if settings.threads is None else {"OMP_NUM_THREADS": str(settings.threads)}
        process = PipeWorker(run_worker, settings, name=f"anyaccel-batch-{worker}", env=threads)
        process.start()
        self._workers[worker] = process

    def give(self, worker: int, rows: Sequence[BatchRow]) -> None:
        """Send rows; that a worker is gone is told by `wait`."""
        self._workers[worker].send(list(rows))

    def wait(self, seconds: float) -> list[Event]:
        """Read what workers say; what one said before it died is read before its death is told."""
        ready = wait_for_messages(self._workers.values(), seconds)
        return [self._read(worker, process) for worker, process in list(self._workers.items()) if process in ready]

    def stop(self) -> None:
        """Kill all: nothing of theirs is on disk."""
        for process in self._workers.values():
            process.kill()
        for process in self._workers.values():
            process.wait(_END_S)
        self._workers.clear()

    def _read(self, worker: int, process: PipeWorker) -> Event:
        try:
            said = process.receive()
        except EOFError:
            del self._workers[worker]
            return WorkerDied(worker, _describe_end(process.wait(_END_S)))
        if isinstance(said, WorkerFacts):
            return WorkerStarted(worker, said)
        return WorkerStartFailed(worker, said) if isinstance(said, AnyaccelError) else RowsFinished(worker, said)


def _describe_end(code: int | None) -> str:
    if code is not None and code < 0:
        return f"it was killed by {signal.Signals(-code).name}"
    return f"it ended with status {code}"


def run_worker(pipe: ParentPipe, settings: WorkerSettings) -> None:
    """The entry of a worker's process."""
    with quiet_libraries():
        _serve(pipe, settings)


def _serve(pipe: ParentPipe, settings: WorkerSettings) -> None:
    said: Any
    try:
        maker = ImageWorker(settings)
    except AnyaccelError as error:
        said = error
    except Exception as error:  # noqa: BLE001 - whatever it is, the leader tells it
        said = AnyaccelError(f"{type(error).__name__}: {error}", hint="does `anyaccel generate` work with the same?")
    else:
        said = maker.facts
    pipe.send(said)
    while not isinstance(said, AnyaccelError):
        pipe.send(maker.make(pipe.receive()))
