"""Handling of Ctrl-C and SIGTERM.

Ctrl-C stops a run at the next denoising step. No signal stops a run while it writes a file.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

import typer

from anyaccel.cli.progress import Display
from anyaccel.processes.signals import TerminatedError, handling_signals, raising_on_sigterm

__all__ = ["INTERRUPTED", "TERMINATED", "Interruption", "cleanup_on_exit"]

# Exit statuses after Ctrl-C and SIGTERM, by shell convention.
INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM


@contextmanager
def cleanup_on_exit() -> Iterator[Display]:
    """Provide a progress display inside the `with` block, and clear it at the end.

    SIGTERM raises an exception inside the block, so that cleanup code runs.
    """
    display = Display()
    try:
        with raising_on_sigterm():
            yield display
    except TerminatedError:
        display.print_line("terminated")
        raise typer.Exit(TERMINATED) from None
    finally:
        display.clear()


class Interruption:
    """Signal handling that stops a run at a safe point.

    An exception in the middle of a step could leave torch or a vendor library in an undefined state, so
    the first Ctrl-C takes effect at the next step. A second Ctrl-C, or SIGTERM, ends the process
    immediately, but never in the middle of writing a file.
    """

    def __init__(self, *, on_wait: Callable[[], None], on_end: Callable[[], None]) -> None:
        self.requested = False
        """Whether the user pressed Ctrl-C."""
        self._on_wait, self._on_end = on_wait, on_end
        self._between_steps = False
        self._writing_file = False
        self._deferred_signal: int | None = None

    def handling(self) -> AbstractContextManager[None]:
        """Return a context manager that handles SIGINT and SIGTERM."""
        return handling_signals(self._on_signal, signal.SIGINT, signal.SIGTERM)

    @contextmanager
    def at_steps(self) -> Iterator[None]:
        """Defer the first Ctrl-C until the next call to `check` or until the end of the `with` block."""
        self._between_steps = True
        try:
            yield
        finally:
            self._between_steps = False
        self.check()

    def check(self) -> None:
        """Raise KeyboardInterrupt if the user pressed Ctrl-C."""
        if self.requested:
            raise KeyboardInterrupt

    @contextmanager
    def after_file(self) -> Iterator[None]:
        """Defer signals until the end of a `with` block that writes a file."""
        self._writing_file = True
        try:
            yield
        finally:
            self._writing_file = False
            if self._deferred_signal is not None:
                self._on_signal(self._deferred_signal, None)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Stopping here would leave a temporary file behind; after_file delivers the signal afterwards.
        if self._writing_file:
            self._deferred_signal = number
        elif number != signal.SIGINT or self.requested:
            self._on_end()
            # Not sys.exit: unwinding would have to wait for the step that is running.
            os._exit(128 + number)
        else:
            self.requested = True
            if not self._between_steps:
                raise KeyboardInterrupt
            self._on_wait()
