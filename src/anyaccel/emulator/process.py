"""A process for each virtual accelerator: there is one a process, and importing torch anew takes seconds.

The caller imports what it needs once and stays without a virtual device; each call forks from there.
"""

from __future__ import annotations

import multiprocessing
import pickle
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.activation import virtual
from anyaccel.errors import VirtualDeviceError
from anyaccel.processes.gc_control import ignore_existing_objects

__all__ = ["fork", "run_forked"]

T = TypeVar("T")


def run_forked(
    device: str,
    function: Callable[[VirtualAccelerator], T],
    *,
    count: int = 1,
    memory: str | int | None = None,
    strict: bool = False,
    timeout_s: float = 600.0,
) -> T:
    """Call `function(accelerator)` in a process of its own that has the virtual device, and give its result."""

    def use() -> T:
        with virtual(device, count=count, memory=memory, strict=strict) as accelerator:
            return function(accelerator)

    return fork(use, name=f"a virtual {device}", timeout_s=timeout_s)


def fork(function: Callable[[], T], *, name: str = "it", timeout_s: float = 600.0) -> T:
    """Call a function in a process that is forked from this one, and give its result.

    An error of the function is raised here as it is, with the other process's traceback as a note from Python 3.11 on.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    worker = context.Process(target=_work, args=(sender, function), daemon=True)
    with warnings.catch_warnings():
        # Python warns of forking beside threads; torch's own are not started before the first large operation.
        warnings.simplefilter("ignore", DeprecationWarning)
        worker.start()
    sender.close()
    try:
        if not receiver.poll(timeout_s):
            raise TimeoutError(f"{name} gave no answer in {timeout_s:.0f} s")
        succeeded, value = pickle.loads(receiver.recv_bytes())
    except EOFError:
        worker.join()
        raise VirtualDeviceError(
            f"the process of {name} died with status {worker.exitcode}",
            hint="run the same with ANYACCEL_VIRTUAL set to see what it printed",
        ) from None
    finally:
        worker.kill()
        worker.join()
        receiver.close()
    if succeeded:
        result: T = value
        return result
    raise value


def _work(sender: Connection, function: Callable[[], Any]) -> None:
    ignore_existing_objects()  # collections among what the parent imported took up to a quarter of the time
    try:
        message = pickle.dumps((True, function()))
    except BaseException as error:  # noqa: BLE001 - whatever it is, the caller's process raises it again
        message = _pack_error(error)
    sender.send_bytes(message)
    sender.close()


def _pack_error(error: BaseException) -> bytes:
    """The error itself where it can be pickled, with where it was raised as a note, else its words."""
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note("".join(traceback.format_exception(error)))
    try:
        message = pickle.dumps((False, error))
        pickle.loads(message)
        return message
    except Exception:  # noqa: BLE001 - an error that cannot be pickled still has words
        text = "".join(traceback.format_exception(error))
        return pickle.dumps((False, RuntimeError(f"{type(error).__name__}: {error}\n{text}")))
