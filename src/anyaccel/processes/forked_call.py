"""A function call in a fork of this process."""

from __future__ import annotations

import multiprocessing
import pickle
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from anyaccel.errors import ProcessDiedError
from anyaccel.processes.gc_control import ignore_existing_objects

__all__ = ["call_in_fork"]

T = TypeVar("T")


def call_in_fork(function: Callable[[], T], *, name: str = "the function", timeout_s: float = 600.0) -> T:
    """Call a function in a fork of this process and return its result.

    An exception of the function is raised here unchanged, with the child's traceback as a note (Python 3.11 and newer).
    A child that does not answer within `timeout_s` seconds is killed.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_run, args=(sender, function), daemon=True)
    try:
        with warnings.catch_warnings():
            # Python warns about a fork beside threads; torch starts its own at the first large operation, not earlier.
            warnings.simplefilter("ignore", DeprecationWarning)
            child.start()
        sender.close()
        if not receiver.poll(timeout_s):
            raise TimeoutError(f"{name} gave no answer in {timeout_s:.0f} s")
        succeeded, value = pickle.loads(receiver.recv_bytes())
    except EOFError:
        child.join()
        raise ProcessDiedError(
            f"the process of {name} died with status {child.exitcode}", hint="see what it printed to stderr"
        ) from None
    finally:
        if child.pid is not None:
            child.kill()
            child.join()
        receiver.close()
    if succeeded:
        result: T = value
        return result
    raise value


def _run(sender: Connection, function: Callable[[], Any]) -> None:
    ignore_existing_objects()  # collections among what the parent imported took up to a quarter of the time
    try:
        message = pickle.dumps((True, function()))
    except BaseException as error:  # noqa: BLE001 - the parent raises it again
        message = _pack_error(error)
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
