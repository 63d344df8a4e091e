"""A function call in a fork of this process, and threads that each wait for such a call."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from anyaccel.errors import ProcessDiedError
from anyaccel.processes.gc_control import ignore_existing_objects
from anyaccel.processes.signals import end_with_parent

__all__ = ["call_in_fork", "forking_threads"]

T = TypeVar("T")

_END_S = 10.0
"""The time from when a child can no longer answer until it has ended by itself."""
_fork_lock = threading.Lock()
"""Held while a child is started, from the creation of its pipe until only the child can write to it: a child that
another thread forks in between would have a copy of the writing end, and keep it open when the first child dies.

Also held while a child is killed and waited for: `multiprocessing` waits for other children when it starts one, and
`warnings.catch_warnings` is not safe in two threads.
"""
_thread = threading.local()
"""`children` is the `_Children` of the pool that a thread belongs to."""


class _Children:
    """The running children of the threads of one pool; `_fork_lock` is held by whoever uses it."""

    def __init__(self) -> None:
        self.running: set[BaseProcess] = set()
        self.ended = False

    def start(self, child: BaseProcess) -> None:
        """Start a child; raise CancelledError if the pool has ended."""
        if self.ended:
            raise CancelledError
        self.running.add(child)
        child.start()

    def end(self, child: BaseProcess) -> None:
        """Kill a child and wait for it; one that has ended already keeps its status."""
        self.running.discard(child)
        if child.pid is not None:
            child.kill()
            child.join()

    def end_all(self) -> None:
        """Kill all children, for which their threads wait, and start no more."""
        self.ended = True
        for child in self.running:
            child.kill()


def call_in_fork(function: Callable[[], T], *, name: str = "the function", timeout_s: float = 600.0) -> T:
    """Call a function in a fork of this process and return its result.

    An exception of the function is raised here unchanged, with the child's traceback as a note (Python 3.11 and newer).
    A child that does not answer within `timeout_s` seconds is killed. On Linux the child ends with the calling thread;
    elsewhere a child whose parent is killed ends when it answers.
    """
    children: _Children = getattr(_thread, "children", None) or _Children()
    child, receiver = _start(function, children)
    message, patience_s = None, 0.0
    try:
        if not receiver.poll(timeout_s):
            raise TimeoutError(f"{name} gave no answer in {timeout_s:.0f} s")
        try:
            message = receiver.recv_bytes()
        except (EOFError, OSError):  # OSError: it was killed while it answered
            patience_s = _END_S
    finally:
        wait([child.sentinel], patience_s)
        with _fork_lock:
            children.end(child)
        receiver.close()
    if message is None and children.ended:
        raise CancelledError
    if message is None:
        raise ProcessDiedError(
            f"the process of {name} died with status {child.exitcode}", hint="see what it printed to stderr"
        )
    succeeded, value = pickle.loads(message)
    if succeeded:
        result: T = value
        return result
    raise value


@contextmanager
def forking_threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """Give a pool of threads that use `call_in_fork`.

    If the block raises, their children are killed, no more are started, and calls that wait raise CancelledError: the
    threads would otherwise have to be waited for.
    """
    children = _Children()
    with ThreadPoolExecutor(count, initializer=_join_pool, initargs=(children,)) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            with _fork_lock:
                children.end_all()
            raise


def _join_pool(children: _Children) -> None:
    _thread.children = children


def _start(function: Callable[[], Any], children: _Children) -> tuple[BaseProcess, Connection]:
    """Start the child, and return it with the end of the pipe that its answer comes from."""
    context = multiprocessing.get_context("fork")
    with _fork_lock:
        receiver, sender = context.Pipe(duplex=False)
        arguments = (os.getpid(), receiver, sender, function)
        child = context.Process(target=_run, args=arguments, daemon=True)
        try:
            with warnings.catch_warnings():
                # Python warns about a fork beside threads; torch starts its own at the first large operation, not
                # earlier.
                warnings.simplefilter("ignore", DeprecationWarning)
                children.start(child)
        except BaseException:
            children.end(child)
            receiver.close()
            raise
        finally:
            sender.close()
    return child, receiver


def _run(parent: int, receiver: Connection, sender: Connection, function: Callable[[], Any]) -> None:
    end_with_parent(parent)
    receiver.close()  # with an open copy here, writing an answer that nobody reads would block for ever
    _thread.children = None  # they are the parent's
    ignore_existing_objects()  # collections among what the parent imported took up to a quarter of the time
    try:
        message = pickle.dumps((True, function()))
    except BaseException as error:  # noqa: BLE001 - the parent raises it again
        message = _pack_error(error)
    with suppress(BrokenPipeError):  # the parent is gone
        sender.send_bytes(message)
    sender.close()


def _pack_error(error: BaseException) -> bytes:
    """Return the pickled error with its traceback as a note, or its text if it cannot be pickled."""
    text = "".join(traceback.format_exception(error))
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(text)
    try:
        message = pickle.dumps((False, error))
        pickle.loads(message)
        return message
    except Exception:  # noqa: BLE001 - a class that is local or needs other arguments raises anything here
        return pickle.dumps((False, RuntimeError(f"{type(error).__name__}: {error}\n{text}")))


def _renew_lock() -> None:
    """Give a forked process a lock that is free: the thread that held it may not exist there."""
    global _fork_lock
    _fork_lock = threading.Lock()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_renew_lock)
