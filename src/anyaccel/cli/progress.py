"""Progress display on stderr: a bar on a terminal, otherwise one line per 10% of the work."""

from __future__ import annotations

import os
import sys
from typing import Any

from anyaccel.progress import ProgressListener

__all__ = ["Display", "shorten_start"]

_LONGEST_NAME = 32


def shorten_start(name: str) -> str:
    """Return the end of a long path, so that the rest of a line with progress fits on a terminal."""
    return name if len(name) <= _LONGEST_NAME else f"…{name[1 - _LONGEST_NAME :]}"


class Display(ProgressListener):
    """Progress display for a command, shown on stderr."""

    def __init__(self) -> None:
        self.live = sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        """Whether stderr is a terminal that can redraw a bar."""
        self._bar: Any = None
        self._task: Any = None
        self._phase = ""
        self._tenths = 0
        self.done = self.total = 0
        """Finished and total rows of a batch."""

    def print_line(self, text: str) -> None:
        """Remove the progress bar and print a line to stderr."""
        self.clear()
        print(text, file=sys.stderr, flush=True)

    def start_phase(self, text: str) -> None:
        """Show the text for a new phase with an indeterminate progress bar."""
        self.clear()
        self._phase = text
        if self.live:
            self._start_bar()

    def on_phase(self, text: str) -> None:
        """Show the text for a new phase of the run."""
        self.start_phase(text)

    def on_message(self, text: str) -> None:
        """Print a message to stderr."""
        self.print_line(text)

    def on_warning(self, text: str) -> None:
        """Print a warning to stderr, with the prefix `warning:`."""
        self.print_line(f"warning: {text}")

    def on_start(self, done: int, total: int) -> None:
        """Print the number of batch rows and how many of them an earlier run finished."""
        self.done, self.total = done, total
        self.print_line(f"{total} row{'s' * (total > 1)}{f', {done} already finished' if done else ''}")

    def on_row(self, done: int, total: int, text: str) -> None:
        """Show the number of finished batch rows."""
        self.done = done
        self.update_count(done, total, text, prefix="")

    def on_component(self, done: int, total: int, name: str) -> None:
        """Show the number of loaded components and the name of the next one."""
        self._update_bar(f"{self._phase}: {name}" if name else self._phase, done, total)

    def on_layer(self, done: int, total: int, text: str) -> None:
        """Show the number of quantized layers."""
        self._update_bar(f"{self._phase}: {text}", done, total)

    def on_step(self, done: int, total: int | None) -> None:
        """Show the number of finished denoising steps."""
        self._update_bar(self._phase, done, total, unit="step ")

    def on_frame(self, done: int, total: int) -> None:
        """Show the number of frames that are in the file."""
        self._update_bar(self._phase, done, total, unit="frame ")

    def update_count(self, done: int, total: int, text: str, *, prefix: str = "last: ") -> None:
        """Show the number of finished items; without a bar, print one line per 10% of the work."""
        if not self.live and done * 10 // total > self._tenths:
            self._tenths = done * 10 // total
            print(f"{done} of {total} done, {prefix}{text}", file=sys.stderr, flush=True)
        self._update_bar(f"{self._phase}: {text}", done, total)

    def show_stopping(self) -> None:
        """Show that the run will stop after the current step."""
        # Runs in a signal handler. Printing could re-enter a stream that is being written; the bar redraws in a thread.
        if self._bar is not None:
            self._bar.update(self._task, description="Stopping after this step; press Ctrl-C again to stop immediately")

    def restore_cursor(self) -> None:
        """Show the cursor again, for a process that is about to exit without cleanup."""
        if self._bar is not None:
            # rich hides the cursor while a bar is shown. os.write is safe in a signal handler, print is not.
            os.write(sys.stderr.fileno(), b"\x1b[?25h\n")

    def clear(self) -> None:
        """Remove the progress bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _update_bar(self, text: str, done: int, total: int | None, *, unit: str = "") -> None:
        if not self.live:
            return
        if self._bar is None:
            self._start_bar()
        count = f"{unit}{done}/?" if total is None else f"{unit}{done:{len(str(total))}}/{total}"
        self._bar.update(self._task, description=text, completed=done, total=total, count=count)

    def _start_bar(self) -> None:
        # Imported here: commands without a bar start faster.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        # No markup: brackets in model names and paths are literal.
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[count]}", markup=False),
            TimeRemainingColumn(compact=True),
        )
        self._bar = Progress(*columns, console=Console(stderr=True, highlight=False), transient=True)
        self._task = self._bar.add_task(self._phase, total=None, count="")
        self._bar.start()
