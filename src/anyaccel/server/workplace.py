"""Where jobs are run: in a process beside the service, or wherever else a service is told."""

from __future__ import annotations

import multiprocessing
import queue
import threading
from multiprocessing.connection import Connection
from typing import Any, Protocol

from anyaccel.server.messages import Cancel, Run
from anyaccel.server.settings import Settings
from anyaccel.server.worker import run_worker

__all__ = ["WorkerProcess", "Workplace"]


class Workplace(Protocol):
    """Takes jobs, and tells what becomes of them in the words of `messages`."""

    heals: bool
    """Whether it replaces by itself what hangs or dies in it; else whoever listens does."""

    def start(self) -> None:
        """Begin to load; whether that works is told."""

    def send(self, message: Run | Cancel) -> None:
        """Hand something over, without waiting."""

    def hear(self, timeout_s: float) -> Any:
        """What is told next, or None where nothing is for so long; raises EOFError where it has ended."""

    def has_room(self, busy: int, pictures: int) -> bool:
        """Whether so many pictures more can begin, beside those that are under way."""

    def end(self) -> None:
        """End at once; from any thread, and more than once."""

    def describe_end(self) -> str:
        """How it ended: `with status -9`."""


class WorkerProcess:
    """One worker in a process of its own, at the other end of a pipe."""

    heals = False

    def __init__(self, settings: Settings) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, self._there = context.Pipe()
        self._process = context.Process(
            target=run_worker, args=(settings, self._there), name="anyaccel-worker", daemon=False
        )
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._most = settings.in_hand
        self._ending = threading.Lock()
        self._ended = False

    def start(self) -> None:
        """Start the process."""
        self._process.start()
        self._there.close()
        threading.Thread(target=_send_all, args=(self._outbox, self._pipe), daemon=True).start()

    def send(self, message: Run | Cancel) -> None:
        """Put it into the pipe, as soon as that takes it."""
        self._outbox.put(message)

    def hear(self, timeout_s: float) -> Any:
        """What comes out of the pipe."""
        try:
            return self._pipe.recv() if self._pipe.poll(timeout_s) else None
        except OSError as error:
            raise EOFError from error

    def has_room(self, busy: int, pictures: int) -> bool:
        """As many as one device has in hand; a job that is larger than that comes when nothing else runs."""
        return busy == 0 or busy + pictures <= self._most

    def end(self) -> None:
        """Kill it."""
        with self._ending:
            if self._ended or self._process.pid is None:
                return
            self._ended = True
            self._process.kill()
            self._process.join()
            self._outbox.put(None)

    def describe_end(self) -> str:
        """Its exit status."""
        return f"with status {self._process.exitcode}"


def _send_all(outbox: queue.SimpleQueue[Any], pipe: Connection) -> None:
    """A thread of its own: a worker that hangs does not read, and nobody else must wait for it."""
    while (message := outbox.get()) is not None:
        try:
            pipe.send(message)
        except OSError:
            return
