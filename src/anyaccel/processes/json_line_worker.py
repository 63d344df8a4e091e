"""A fresh interpreter that answers requests, one line of JSON each.

The parent holds a `JsonLineWorker`. The module that it names uses `connecting_to_parent` in the child. This file is
also the script that the child starts with: it imports only the standard library, so that the module decides what is
imported first.
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
    """A child process that runs a module as `python -m` does and answers JSON messages in order.

    A context manager: the process is killed at the end of the block. A child whose parent is killed ends when it next
    reads or answers.
    """

    def __init__(
        self, module: str, *arguments: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> None:
        self.stderr = ""
        """The last of what the process wrote to stderr and stdout, once it was closed or killed."""
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
        """Send a message and return its answer, as `receive` does."""
        self.send(message)
        return self.receive(timeout_s)

    def send(self, message: Any) -> None:
        """Send a message without waiting for its answer; `receive` reports that the process has ended."""
        with contextlib.suppress(BrokenPipeError):
            self._requests.write(json.dumps(message) + "\n")
            self._requests.flush()

    def receive(self, timeout_s: float = threading.TIMEOUT_MAX) -> Any:
        """Return the next answer.

        Raises EOFError if the process ends first. A process that does not answer in time is killed.
        """
        timer = threading.Timer(timeout_s, self._process.kill)
        timer.start()
        try:
            line = self._answers.readline()
        finally:
            timer.cancel()
        if not line.endswith("\n"):
            raise EOFError(f"the process {self._process.pid} ended before it answered")
        return json.loads(line)

    def close(self, timeout_s: float = _END_S) -> int:
        """Let the process end by itself, kill it if it does not in time, and return its exit status."""
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
        """Kill the process and return its exit status; one that has ended already keeps its own."""
        self._process.kill()
        return self.close()

    def __enter__(self) -> JsonLineWorker:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()


@contextmanager
def connecting_to_parent() -> Iterator[tuple[Iterator[Any], Callable[[Any], None]]]:
    """Give the parent's messages, which end when it closes the worker or is gone, and a function that answers one."""
    incoming, outgoing = (int(descriptor) for descriptor in os.environ.pop(_PIPES).split(","))
    with os.fdopen(incoming) as requests, os.fdopen(outgoing, "w") as answers:

        def answer(message: Any) -> None:
            answers.write(json.dumps(message) + "\n")
            answers.flush()

        yield map(json.loads, requests), answer


def _run_module() -> None:
    """Run the module that the command line names; nothing but answers reaches the parent's pipe."""
    os.environ[_PIPES] = f"{os.dup(0)},{os.dup(1)}"
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11
        sys.path[0] = os.getcwd()  # as `python -m` has it, not this file's directory
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _run_module()
