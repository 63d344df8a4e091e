"""A crew: the workers of a batch as the one who leads it sees them, and the one of this machine's processes."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, TypeAlias

from anyaccel.cluster.maker import Facts, Made, Maker, Refused, Settings
from anyaccel.cluster.rows import Row
from anyaccel.errors import AnyaccelError
from anyaccel.library_logging import quiet_libraries

__all__ = ["Broken", "Crew", "Event", "Finished", "LocalCrew", "Lost", "Ready"]

_END_S = 5.0


@dataclass(frozen=True)
class Ready:
    """A worker has its model."""

    worker: int
    facts: Facts


@dataclass(frozen=True)
class Finished:
    """A worker has done the first of what it was given."""

    worker: int
    outcomes: list[Made | Refused]


@dataclass(frozen=True)
class Broken:
    """A worker cannot have its model, and says why."""

    worker: int
    error: AnyaccelError


@dataclass(frozen=True)
class Lost:
    """A worker is gone, with all that it had to do."""

    worker: int
    reason: str


Event: TypeAlias = Ready | Finished | Broken | Lost


class Crew(Protocol):
    """Workers by number; each does what it is given in turn."""

    def start(self, worker: int, settings: Settings) -> None:
        """Let a worker begin to load its model; one of that number that is gone is replaced."""

    def give(self, worker: int, rows: Sequence[Row]) -> None:
        """Give a worker rows of one shape to make."""

    def wait(self, seconds: float) -> list[Event]:
        """What has happened, or nothing after so many seconds."""

    def stop(self) -> None:
        """End all workers at once."""


class LocalCrew:
    """A process a worker, each at the end of a pipe."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._workers: dict[int, tuple[BaseProcess, Connection]] = {}

    def start(self, worker: int, settings: Settings) -> None:
        """Start a process."""
        here, there = self._context.Pipe()
        process = self._context.Process(
            target=run_worker, args=(settings, there), name=f"anyaccel-batch-{worker}", daemon=True
        )
        with _with_threads(settings.threads):
            process.start()
        there.close()
        self._workers[worker] = (process, here)

    def give(self, worker: int, rows: Sequence[Row]) -> None:
        """Send rows; that a worker is gone is told by `wait`."""
        try:
            self._workers[worker][1].send(list(rows))
        except (BrokenPipeError, OSError):
            return

    def wait(self, seconds: float) -> list[Event]:
        """Read what workers say; what one said before it died is read before its death is told."""
        pipes = {pipe: worker for worker, (_, pipe) in self._workers.items()}
        events = []
        for pipe in wait(list(pipes), seconds):
            assert isinstance(pipe, Connection)
            events.append(self._read(pipes[pipe], pipe))
        return events

    def stop(self) -> None:
        """Kill all: nothing of theirs is on disk."""
        for process, pipe in self._workers.values():
            pipe.close()
            process.kill()
        for process, _ in self._workers.values():
            process.join(_END_S)
        self._workers.clear()

    def _read(self, worker: int, pipe: Connection) -> Event:
        try:
            said = pipe.recv()
        except (EOFError, OSError):
            process, _ = self._workers.pop(worker)
            pipe.close()
            process.join(_END_S)
            return Lost(worker, _describe_end(process.exitcode))
        if isinstance(said, Facts):
            return Ready(worker, said)
        return Broken(worker, said) if isinstance(said, AnyaccelError) else Finished(worker, said)


def _describe_end(code: int | None) -> str:
    if code is not None and code < 0:
        return f"it was killed by {signal.Signals(-code).name}"
    return f"it ended with status {code}"


class _with_threads:  # noqa: N801 - read as `with _with_threads(1):`
    """A process that is started here finds so many threads in its environment, before it imports anything."""

    def __init__(self, threads: int | None) -> None:
        self.wanted = None if threads is None else str(threads)

    def __enter__(self) -> None:
        self.before = os.environ.get("OMP_NUM_THREADS")
        if self.wanted is not None:
            os.environ["OMP_NUM_THREADS"] = self.wanted

    def __exit__(self, *_: object) -> None:
        if self.wanted is None:
            return
        if self.before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = self.before


def run_worker(settings: Settings, pipe: Connection) -> None:
    """The entry of a worker's process: it ends when the pipe does, whatever it is doing."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches all: the leader decides
    asked: queue.SimpleQueue[list[Row]] = queue.SimpleQueue()

    def read() -> None:
        while True:
            try:
                asked.put(pipe.recv())
            except (EOFError, OSError):
                os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    with quiet_libraries():
        _serve(settings, pipe, asked)


def _serve(settings: Settings, pipe: Connection, asked: queue.SimpleQueue[list[Row]]) -> None:
    said: Any
    try:
        maker = Maker(settings)
    except AnyaccelError as error:
        said = error
    except Exception as error:  # noqa: BLE001 - whatever it is, the leader tells it
        said = AnyaccelError(f"{type(error).__name__}: {error}", hint="does `anyaccel generate` work with the same?")
    else:
        said = maker.facts
    pipe.send(said)
    while not isinstance(said, AnyaccelError):
        pipe.send(maker.make(asked.get()))
