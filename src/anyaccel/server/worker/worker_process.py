"""Where jobs are run: in a process beside the service, or wherever else a service is told."""

from __future__ import annotations

from typing import Any, Protocol

from anyaccel.processes.pipe_worker import PipeWorker
from anyaccel.server.settings import ServerSettings
from anyaccel.server.worker.messages import CancelJob, RunJob
from anyaccel.server.worker.worker import run_worker

__all__ = ["WorkerProcess", "WorkerTransport"]


class WorkerTransport(Protocol):
    """Takes jobs, and tells what becomes of them in the words of `messages`."""

    heals: bool
    """Whether it replaces by itself what hangs or dies in it; else whoever listens does."""

    def start(self) -> None:
        """Begin to load; whether that works is told."""

    def send(self, message: RunJob | CancelJob) -> None:
        """Hand something over, without waiting."""

    def hear(self, timeout_s: float) -> Any:
        """What is told next, or None where nothing is for so long; raises EOFError where it has ended."""

    def has_room(self, busy: int, pictures: int) -> bool:
        """Whether so many pictures more can begin, beside those that are under way."""

    def end(self) -> None:
        """End at once; from any thread, and more than once."""

    def describe_end(self) -> str:
        """How it ended: `with status -9`."""


class WorkerProcess(PipeWorker):
    """One worker in a process of its own, at the other end of a pipe."""

    heals = False

    def __init__(self, settings: ServerSettings) -> None:
        super().__init__(run_worker, settings, name="anyaccel-worker")
        self._most = settings.in_hand

    def hear(self, timeout_s: float) -> Any:
        """What comes out of the pipe."""
        return self.receive(timeout_s)

    def has_room(self, busy: int, pictures: int) -> bool:
        """As many as one device has in hand; a job that is larger than that comes when nothing else runs."""
        return busy == 0 or busy + pictures <= self._most

    def end(self) -> None:
        """Kill it."""
        self.kill()
        self.wait()

    def describe_end(self) -> str:
        """Its exit status."""
        return f"with status {self.wait()}"
