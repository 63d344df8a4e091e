"""Worker pool interface for the batch runner, and an implementation that uses local processes."""

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

# Time to wait for the exit of a killed process, which a driver may delay.
_EXIT_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class WorkerStarted:
    """Event sent when a worker has loaded its model."""

    worker: int
    facts: WorkerFacts


@dataclass(frozen=True)
class RowsFinished:
    """Event sent when a worker has processed the oldest rows in its queue, with an image or error per row."""

    worker: int
    outcomes: list[RowImage | RowFailed]


@dataclass(frozen=True)
class WorkerStartFailed:
    """Event sent when a worker could not load its model."""

    worker: int
    error: AnyaccelError


@dataclass(frozen=True)
class WorkerDied:
    """Event sent when a worker has died; the rows in its queue must be submitted again."""

    worker: int
    reason: str


Event: TypeAlias = WorkerStarted | RowsFinished | WorkerStartFailed | WorkerDied


class WorkerPool(Protocol):
    """Interface for a pool of numbered workers, each with a queue of rows."""

    def start(self, worker: int, settings: WorkerSettings) -> None:
        """Start a worker, or restart one that died; its model loads in the background."""

    def submit(self, worker: int, rows: Sequence[BatchRow]) -> None:
        """Add rows to a worker's queue; the rows must be able to share one pipeline call."""

    def wait(self, seconds: float) -> list[Event]:
        """Return the next events, or an empty list if none arrives within `seconds` seconds."""

    def stop(self) -> None:
        """Kill all workers."""


class LocalWorkerPool:
    """Worker pool with one local process per worker, each connected through a pipe."""

    def __init__(self) -> None:
        self._workers: dict[int, PipeWorker] = {}

    def start(self, worker: int, settings: WorkerSettings) -> None:
        """Start a worker process, which loads its model in the background."""
        # OpenMP reads this when torch is imported, before the worker can call torch.set_num_threads.
        threads = {} if settings.threads is None else {"OMP_NUM_THREADS": str(settings.threads)}
        process = PipeWorker(run_worker, settings, name=f"anyaccel-batch-{worker}", env=threads)
        process.start()
        self._workers[worker] = process

    def submit(self, worker: int, rows: Sequence[BatchRow]) -> None:
        """Send rows to a worker process; if the process has died, `wait` returns a `WorkerDied` event."""
        self._workers[worker].send(list(rows))

    def wait(self, seconds: float) -> list[Event]:
        """Wait for messages from the worker processes, and return at most one event per process.

        A `WorkerDied` event is returned only after all messages that the process sent before it died.
        """
        ready = wait_for_messages(self._workers.values(), seconds)
        return [self._read(worker, process) for worker, process in list(self._workers.items()) if process in ready]

    def stop(self) -> None:
        """Kill all worker processes; this is safe because they do not write files."""
        # Kill all before waiting for any, so that they exit concurrently.
        for process in self._workers.values():
            process.kill()
        for process in self._workers.values():
            process.wait(_EXIT_TIMEOUT_S)
        self._workers.clear()

    def _read(self, worker: int, process: PipeWorker) -> Event:
        try:
            message = process.receive()
        # The pipe closes when the process dies, after its last message.
        except EOFError:
            del self._workers[worker]
            return WorkerDied(worker, _format_exit(process.wait(_EXIT_TIMEOUT_S)))
        if isinstance(message, WorkerFacts):
            return WorkerStarted(worker, message)
        return (
            WorkerStartFailed(worker, message) if isinstance(message, AnyaccelError) else RowsFinished(worker, message)
        )


def _format_exit(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"ended with status {code}"


def run_worker(pipe: ParentPipe, settings: WorkerSettings) -> None:
    """Run a worker process: load the model, then generate images for the rows received through the pipe."""
    with quiet_libraries():
        _serve(pipe, settings)


def _serve(pipe: ParentPipe, settings: WorkerSettings) -> None:
    message: Any
    try:
        worker = ImageWorker(settings)
    except AnyaccelError as error:
        message = error
    except Exception as error:  # noqa: BLE001 - reported by the parent process
        message = AnyaccelError(
            f"cannot load the model: {type(error).__name__}: {error}",
            hint="run `anyaccel generate` with the same model and device to reproduce the error",
        )
    else:
        message = worker.facts
    pipe.send(message)
    # Ends only with the process: `ParentPipe` exits it when the parent closes the pipe or dies.
    while not isinstance(message, AnyaccelError):
        pipe.send(worker.generate(pipe.receive()))
