"""A child Python process that answers requests, with one line of JSON per message.

The parent creates a `JsonLineWorker` for a module, and that module uses `connecting_to_parent` in
the child. This file is also the child's startup script. It imports only the standard library, so
that the module controls which libraries are imported first.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["JsonLineWorker", "connecting_to_parent"]

_PIPES = "ANYACCEL_WORKER_PIPES"
_END_S = 60.0
_STDERR_BYTES = 65536


class JsonLineWorker:
    """A child process that runs a module, as `python -m` does, and answers JSON messages in order.

    As a context manager, it kills the process at the end of the `with` block. If the parent is killed,
    the child exits at its next read or write.
    """

    def __init__(
        self, module: str, *arguments: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> None:
        self.stderr = ""
        """The last 64 KiB that the process wrote to stderr and stdout; set by `close` and `kill`."""
        # A file, not a pipe: a pipe that nobody reads would block the child.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - open until the process has ended
        self._process = subprocess.Popen(
            [sys.executable, __file__, module, *arguments],
            env={**os.environ, **(env or {})},
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output,
            text=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout

    def request(self, message: Any, timeout_s: float = threading.TIMEOUT_MAX) -> Any:
        """Send a message and return the answer; raise EOFError if the process exits first.

        A process that does not answer within `timeout_s` seconds is killed.
        """
        self.send(message)
        return self.receive(timeout_s)

    def send(self, message: Any) -> None:
        """Send a message without waiting for the answer.

        If the process has exited, this does not raise, but `receive` does.
        """
        with contextlib.suppress(BrokenPipeError):
            self._requests.write(json.dumps(message) + "\n")
            self._requests.flush()

    def receive(self, timeout_s: float = threading.TIMEOUT_MAX) -> Any:
        """Return the next answer; raise EOFError if the process exits first.

        A process that does not answer within `timeout_s` seconds is killed.
        """
        # readline() has no timeout. Killing the process makes it return.
        timer = threading.Timer(timeout_s, self._process.kill)
        timer.start()
        try:
            line = self._answers.readline()
        finally:
            timer.cancel()
        if not line.endswith("\n"):
            raise EOFError(f"process {self._process.pid} exited before responding")
        return json.loads(line)

    def close(self, timeout_s: float = _END_S) -> int:
        """Close the message pipes, wait for the process to exit, and return its exit status.

        A process that does not exit within `timeout_s` seconds is killed.
        """
        # Closing its stdin ends the child's iterator over messages.
        for pipe in (self._requests, self._answers):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        if not self._output.closed:
            size = self._output.seek(0, os.SEEK_END)
            self._output.seek(max(0, size - _STDERR_BYTES))
            self.stderr = self._output.read().decode(errors="replace")
            self._output.close()
        return status

    def kill(self) -> int:
        """Kill the process if it is still running, and return its exit status."""
        self._process.kill()
        return self.close()

    def __enter__(self) -> JsonLineWorker:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()


@contextmanager
def connecting_to_parent() -> Iterator[tuple[Iterator[Any], Callable[[Any], None]]]:
    """Connect a child to its parent: provide an iterator over messages and a function to send answers.

    The iterator ends when the parent closes the worker or exits.
    """
    incoming, outgoing = (int(descriptor) for descriptor in os.environ.pop(_PIPES).split(","))
    with os.fdopen(incoming) as requests, os.fdopen(outgoing, "w") as answers:

        def answer(message: Any) -> None:
            answers.write(json.dumps(message) + "\n")
            answers.flush()

        yield map(json.loads, requests), answer


def _run_module() -> None:
    """Run the module named on the command line, with message pipes separate from stdin and stdout.

    Anything that the module prints goes to stderr.
    """
    # Prints of the module and its libraries must not mix with the answers: stdout becomes stderr.
    os.environ[_PIPES] = f"{os.dup(0)},{os.dup(1)}"
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11
        sys.path[0] = os.getcwd()  # like `python -m`, instead of this file's directory
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _run_module()
