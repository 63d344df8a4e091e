"""Function calls in forked child processes, and a thread pool for making them."""

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

# Seconds to wait for a child that closed its pipe to exit on its own.
_END_S = 10.0
# Held while a child is started, from the creation of its pipe until only the child can write to it: a child that
# another thread forks in between would have a copy of the writing end, and keep it open when the first child dies.
# Also held while a child is joined: starting another one polls all children, and one of two waits misses the status.
_fork_lock = threading.Lock()
# `children` is the `_Children` of the pool that a thread belongs to.
_thread = threading.local()


class _Children:
    """The running child processes of one thread pool; callers must hold `_fork_lock`."""

    def __init__(self) -> None:
        self.running: set[BaseProcess] = set()
        self.ended = False

    def start(self, child: BaseProcess) -> None:
        """Start a child process; raise CancelledError if the pool has shut down."""
        if self.ended:
            raise CancelledError
        self.running.add(child)
        child.start()

    def end(self, child: BaseProcess) -> None:
        """Kill a child process and wait for it to exit; a process that has exited keeps its exit status."""
        self.running.discard(child)
        if child.pid is not None:
            child.kill()
            child.join()

    def end_all(self) -> None:
        """Kill all child processes and prevent new ones from starting.

        The pool's threads wait for the killed processes to exit.
        """
        self.ended = True
        for child in self.running:
            child.kill()


def call_in_fork(function: Callable[[], T], *, name: str = "the function", timeout_s: float = 600.0) -> T:
    """Call a function in a forked child process and return its result.

    An exception in the function is re-raised in the caller, with the child's traceback as a note
    (Python 3.11 and newer). If the function does not return within `timeout_s` seconds, the child is
    killed and TimeoutError is raised. On Linux, the child is also killed when the calling thread ends.
    On other systems, if the parent is killed, the child exits when the function returns.
    """
    children: _Children = getattr(_thread, "children", None) or _Children()
    child, receiver = _start(function, children)
    message, grace_s = None, 0.0
    try:
        if not receiver.poll(timeout_s):
            raise TimeoutError(f"{name} did not return within {timeout_s:.0f} s")
        try:
            message = receiver.recv_bytes()
        except (EOFError, OSError):  # OSError: the child was killed while it wrote its result
            grace_s = _END_S
    finally:
        wait([child.sentinel], grace_s)
        with _fork_lock:
            children.end(child)
        receiver.close()
    if message is None and children.ended:
        raise CancelledError
    if message is None:
        raise ProcessDiedError(
            f"the process running {name} exited with status {child.exitcode}",
            hint="see the output of the process on stderr",
        )
    succeeded, value = pickle.loads(message)
    if succeeded:
        result: T = value
        return result
    raise value


@contextmanager
def forking_threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """Provide a thread pool for functions that use `call_in_fork`.

    If the `with` block raises, all child processes are killed, no more are started, and pending calls
    raise CancelledError. The exception propagates without waiting for the functions to finish.
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
    """Start a child process that runs the function; return it and the receiving end of its pipe."""
    context = multiprocessing.get_context("fork")
    with _fork_lock:
        receiver, sender = context.Pipe(duplex=False)
        arguments = (os.getpid(), receiver, sender, function)
        child = context.Process(target=_run, args=arguments, daemon=True)
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns about forks in a process with threads (https://github.com/python/cpython/issues/100228).
                # torch starts its threads only at the first large operation. catch_warnings is safe under the lock.
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
    receiver.close()  # with an open copy here, writing a result that nobody reads would block forever
    _thread.children = None  # the inherited value belongs to the parent
    ignore_existing_objects()  # collecting the parent's objects took up to a quarter of the time
    try:
        message = pickle.dumps((True, function()))
    except BaseException as error:  # noqa: BLE001 - the parent re-raises it
        message = _pack_error(error)
    with suppress(BrokenPipeError):  # the parent has exited
        sender.send_bytes(message)
    sender.close()


def _pack_error(error: BaseException) -> bytes:
    """Pickle an exception, with its traceback as a note.

    If it cannot be pickled, pickle a RuntimeError that contains its text instead.
    """
    text = "".join(traceback.format_exception(error))
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(text)
    try:
        message = pickle.dumps((False, error))
        pickle.loads(message)  # some exceptions pickle, but fail to unpickle
        return message
    except Exception:  # noqa: BLE001 - local classes and unusual constructors raise anything here
        return pickle.dumps((False, RuntimeError(f"{type(error).__name__}: {error}\n{text}")))


def _renew_lock() -> None:
    """Replace `_fork_lock` in a forked child, where the thread that held the lock does not exist."""
    global _fork_lock
    _fork_lock = threading.Lock()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_renew_lock)
