"""Temporary signal handlers, and termination of child processes when their parent exits."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import NoReturn

__all__ = ["TerminatedError", "end_with_parent", "handling_signals", "raising_on_sigterm"]

_PR_SET_PDEATHSIG = 1


class TerminatedError(BaseException):
    """Raised on SIGTERM; like KeyboardInterrupt, it is not caught by `except Exception`."""


@contextmanager
def handling_signals(handler: Callable[[int, FrameType | None], None], *numbers: signal.Signals) -> Iterator[None]:
    """Install a signal handler inside the `with` block, then restore the previous handlers.

    Signals that the process ignores remain ignored. Outside the main thread, where Python does not
    allow signal handlers, this does nothing.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    handled = [number for number in numbers if in_main_thread and signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def raising_on_sigterm() -> AbstractContextManager[None]:
    """Raise `TerminatedError` on SIGTERM inside the `with` block, so cleanup runs as it does after Ctrl-C."""
    return handling_signals(_raise_terminated, signal.SIGTERM)


def end_with_parent(parent: int) -> None:
    """Kill this process when the thread that started it ends; `parent` is the ID of the parent process.

    This has an effect only on Linux.
    """
    if sys.platform == "linux":
        import ctypes

        # See prctl(2): the signal is sent when the parent thread, not the process, ends.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before the call above
            os._exit(1)


def _raise_terminated(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # a second SIGTERM must not interrupt the cleanup
    raise TerminatedError
