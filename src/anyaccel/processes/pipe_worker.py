"""A long-lived child process that exchanges pickled messages with its parent."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any

__all__ = ["ParentPipe", "PipeWorker", "wait_for_messages"]


class PipeWorker:
    """A spawned process that runs `target(pipe, *arguments)`, where `pipe` is a `ParentPipe`.

    The process exits when `target` returns, when it is killed, or when the parent process exits.
    As a context manager, it starts the process on entry and kills it on exit.
    """

    def __init__(
        self, target: Callable[..., None], *arguments: Any, name: str, env: Mapping[str, str] | None = None
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, self._child_end = context.Pipe()
        self._process = context.Process(target=_run, args=(self._child_end, target, arguments), name=name)
        self._env = env or {}
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._waiting = threading.Lock()

    def start(self) -> None:
        """Start the process, and a thread that sends queued messages to it."""
        with _environment(self._env):
            self._process.start()
        self._child_end.close()  # with a copy open in this process, `receive` would not notice that the child exited
        atexit.register(self.kill)  # at exit, multiprocessing would wait for children that are still running
        threading.Thread(target=self._send_all, name=f"{self._process.name}-sender", daemon=True).start()

    def send(self, message: Any) -> None:
        """Queue a message for the process; raise if the message cannot be pickled.

        If the process has exited, this does not raise, but `receive` does.
        """
        # Pickled here, so an unpicklable message raises in the caller and not in the sender thread.
        self._outbox.put(ForkingPickler.dumps(message))

    def receive(self, timeout_s: float | None = None) -> Any:
        """Return the next message, or None if no message arrives within `timeout_s` seconds.

        Raise EOFError if the process has exited.
        """
        try:
            return self._connection.recv() if self._connection.poll(timeout_s) else None
        except OSError as error:
            raise EOFError from error

    def kill(self) -> None:
        """Kill the process without waiting for it to exit.

        This can be called repeatedly and from any thread.
        """
        if self._process.pid is not None:
            self._process.kill()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for the process to exit and return its exit status.

        Return None if the process is still running after `timeout_s` seconds.
        """
        with self._waiting:  # if two threads wait for one process, one of them misses its status
            if self._process.pid is not None:
                self._process.join(timeout_s)
            if self._process.exitcode is not None:
                self._outbox.put(None)
                atexit.unregister(self.kill)
            return self._process.exitcode

    def __enter__(self) -> PipeWorker:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        self.wait()

    def _send_all(self) -> None:
        """Send queued messages until the process exits.

        This runs in a separate thread, because sending to an unresponsive child would block the caller.
        """
        while (pickled := self._outbox.get()) is not None:
            try:
                self._connection.send_bytes(pickled)
            except OSError:
                return


def wait_for_messages(workers: Collection[PipeWorker], timeout_s: float) -> list[PipeWorker]:
    """Wait until a worker has sent a message or exited, for at most `timeout_s` seconds.

    Return the workers on which `receive` will not block; the list is empty after a timeout.
    """
    ready = wait([worker._connection for worker in workers], timeout_s)
    return [worker for worker in workers if worker._connection in ready]


class ParentPipe:
    """The child's end of the pipe to its parent; the child exits as soon as the parent exits."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._receive_all, name="parent-reader", daemon=True).start()

    def send(self, message: Any) -> None:
        """Send a message to the parent; this is safe to call from any thread."""
        with self._sending:
            try:
                self._connection.send(message)
            except OSError:
                os._exit(0)  # not sys.exit, which would only end this thread

    def receive(self) -> Any:
        """Wait for the next message from the parent and return it."""
        return self._inbox.get()

    def _receive_all(self) -> None:
        while True:
            try:
                self._inbox.put(self._connection.recv())
            except (EOFError, OSError):
                os._exit(0)


def _run(connection: Connection, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the parent handles it
    target(ParentPipe(connection), *arguments)


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the `with` block, then restore the previous values.

    A process that is spawned inside the block has the variables before its first import.
    """
    before = {name: os.environ[name] for name in changes if name in os.environ}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name in changes:
            del os.environ[name]
        os.environ.update(before)
