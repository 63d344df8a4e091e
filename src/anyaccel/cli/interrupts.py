"""Ctrl-C and the end of a process: at the next step, or at once where no step is to come; never in half a file."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

import typer

from anyaccel.cli.progress import Display
from anyaccel.processes.signals import TerminatedError, handling_signals, raising_on_sigterm

__all__ = ["ENDED", "INTERRUPTED", "Interruption", "cleanup_on_exit"]

INTERRUPTED, ENDED = 128 + signal.SIGINT, 128 + signal.SIGTERM
"""What a process that Ctrl-C or another process ended exits with."""


@contextmanager
def cleanup_on_exit() -> Iterator[Display]:
    """A display while the block runs. SIGTERM ends the block as Ctrl-C does: its processes and its files go."""
    display = Display()
    try:
        with raising_on_sigterm():
            yield display
    except TerminatedError:
        display.say("ended")
        raise typer.Exit(ENDED) from None
    finally:
        display.clear()


class Interruption:
    """Ends the work where it can be ended.

    An exception in the middle of a step would leave torch's and a vendor's library half way: the first Ctrl-C waits for
    the next step. A second one, and the end that another process asks for, wait for nothing but a file that is just
    being written: the process ends there and then.
    """

    def __init__(self, *, on_wait: Callable[[], None], on_end: Callable[[], None]) -> None:
        self.asked = False
        """Whether the user asked for the end."""
        self._on_wait, self._on_end = on_wait, on_end
        self._in_picture = False
        self._in_file = False
        self._held_back: int | None = None

    def handling(self) -> AbstractContextManager[None]:
        """Handle the signals while the block runs."""
        return handling_signals(self._on_signal, signal.SIGINT, signal.SIGTERM)

    @contextmanager
    def at_steps(self) -> Iterator[None]:
        """While the block runs, a first Ctrl-C waits for `check`; at the block's end it is raised at the latest."""
        self._in_picture = True
        try:
            yield
        finally:
            self._in_picture = False
        self.check()

    def check(self) -> None:
        """Raise if the user asked for the end."""
        if self.asked:
            raise KeyboardInterrupt

    @contextmanager
    def after_file(self) -> Iterator[None]:
        """While the block writes a file, a signal waits for its end."""
        self._in_file = True
        try:
            yield
        finally:
            self._in_file = False
            if self._held_back is not None:
                self._on_signal(self._held_back, None)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._in_file:
            self._held_back = number
        elif number != signal.SIGINT or self.asked:
            self._on_end()
            os._exit(128 + number)
        else:
            self.asked = True
            if not self._in_picture:
                raise KeyboardInterrupt
            self._on_wait()
