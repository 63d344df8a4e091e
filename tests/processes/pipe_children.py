"""Functions that the child processes of `test_pipe_worker` run."""

import os
import signal
import time
from typing import Any

from anyaccel.processes.pipe_worker import ParentPipe, PipeWorker


def echo(pipe: ParentPipe, *first: Any) -> None:
    for message in first:
        pipe.send(message)
    while True:
        pipe.send(pipe.receive())


def describe(pipe: ParentPipe) -> None:
    pipe.send((os.environ.get("FLAVOUR"), signal.getsignal(signal.SIGINT)))


def fail(pipe: ParentPipe) -> None:
    pipe.send("last message")
    raise ValueError("seven")


def hang(pipe: ParentPipe) -> None:
    pipe.send(os.getpid())
    time.sleep(60)


def start_and_hang(exits: bool) -> None:
    """Start a child that hangs, print its process id, and exit or wait."""
    worker = PipeWorker(hang, name="hanging")
    worker.start()
    print(worker.receive(), flush=True)
    if not exits:
        time.sleep(60)
