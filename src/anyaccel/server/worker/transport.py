"""`WorkerTransport` interface, and an implementation that uses one child process."""

from __future__ import annotations

from typing import Any, Protocol

from anyaccel.processes.pipe_worker import PipeWorker
from anyaccel.server.settings import ServerSettings
from anyaccel.server.worker.messages import CancelJob, RunJob
from anyaccel.server.worker.worker import run_worker

__all__ = ["WorkerProcess", "WorkerTransport"]

# A killed process that hangs in the driver exits only when the driver returns, which may be never.
_KILL_S = 10.0


# `cluster.serve.replica_pool` implements this interface for workers on Ray.
class WorkerTransport(Protocol):
    """Interface for running jobs on one or more workers.

    Workers report their progress with the message classes in `messages`.
    """

    self_healing: bool
    """Whether the transport itself replaces workers that hang or die; otherwise the dispatcher does."""

    def start(self) -> None:
        """Start loading the models; a `ModelsReady` or `LoadFailed` message reports the outcome."""

    def send(self, message: RunJob | CancelJob) -> None:
        """Send a message to the workers without waiting for a reply."""

    def receive(self, timeout_s: float) -> Any:
        """Return the next message, or None if none arrives within `timeout_s` seconds.

        Raises `EOFError` if the transport has ended.
        """

    def has_capacity(self, busy: int, images: int) -> bool:
        """Return whether `images` more images can start while `busy` images are being generated."""

    def end(self) -> None:
        """Terminate all workers immediately; safe to call from any thread and more than once."""

    def describe_end(self) -> str:
        """Return a description of how the transport ended, such as `with status -9`, for the log."""


class WorkerProcess(PipeWorker):
    """Transport that runs a single worker in a child process."""

    self_healing = False

    def __init__(self, settings: ServerSettings) -> None:
        super().__init__(run_worker, settings, name="anyaccel-worker")
        self._max_in_flight = settings.max_in_flight

    def has_capacity(self, busy: int, images: int) -> bool:
        """Return whether `images` more images can start while `busy` images are being generated."""
        # A job with more images than the limit never fits: it starts when nothing else runs.
        return busy == 0 or busy + images <= self._max_in_flight

    def end(self) -> None:
        """Kill the worker process and wait a few seconds until it has exited."""
        # Not SIGTERM, which the worker ignores. All state is in the job store, so nothing is lost.
        self.kill()
        self.wait(_KILL_S)

    def describe_end(self) -> str:
        """Return a description of the process's exit status, such as `with status -9`, for the log."""
        status = self.wait(0)
        return "but is still in a call to the device's driver" if status is None else f"with status {status}"
