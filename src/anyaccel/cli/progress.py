"""What is seen while something long goes on: a bar on stderr, on a terminal alone; elsewhere a line now and then."""

from __future__ import annotations

import os
import sys
from typing import Any

from anyaccel.progress import ProgressListener

__all__ = ["Display"]


class Display(ProgressListener):
    """Shows how far the work is."""

    def __init__(self) -> None:
        self.live = sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._bars: Any = None
        self._task: Any = None
        self._words = ""
        self._tenths = 0
        self.done = self.total = 0
        """The rows of a batch."""

    def say(self, text: str) -> None:
        """A line on stderr, with no bar in its way."""
        self.clear()
        print(text, file=sys.stderr, flush=True)

    def begin(self, words: str) -> None:
        """Something new begins; how long it takes is not known yet."""
        self.clear()
        self._words = words
        if self.live:
            self._start()

    def on_phase(self, text: str) -> None:
        """Show the phase until something is counted."""
        self.begin(text)

    def on_message(self, text: str) -> None:
        """Print a line."""
        self.say(text)

    def on_warning(self, text: str) -> None:
        """Print a line that begins with `warning:`."""
        self.say(f"warning: {text}")

    def on_start(self, done: int, total: int) -> None:
        """Print the number of rows."""
        self.done, self.total = done, total
        self.say(f"{total} row{'s' * (total > 1)}{f', {done} of them over' if done else ''}")

    def on_row(self, done: int, total: int, text: str) -> None:
        """Show the rows that are done."""
        self.done = done
        self.count(done, total, text, joint="")

    def on_component(self, done: int, total: int, name: str) -> None:
        """So many components of a model are loaded."""
        self._update(f"{self._words}: {name}" if name else self._words, done, total)

    def on_step(self, done: int, total: int | None) -> None:
        """So many steps are done."""
        self._update(self._words, done, total)

    def count(self, done: int, total: int, words: str, *, joint: str = "the last: ") -> None:
        """So much of something long is done; where there is no bar, every tenth of it is a line."""
        if not self.live and done * 10 // total > self._tenths:
            self._tenths = done * 10 // total
            print(f"{done} of {total} done, {joint}{words}", file=sys.stderr, flush=True)
        self._update(f"{self._words}: {words}", done, total)

    def warn_of_end(self) -> None:
        """Say that the next step is the last; called while a signal is handled, where nothing may be printed."""
        if self._bars is not None:
            self._bars.update(self._task, description="stopping after this step; Ctrl-C again stops at once")

    def abandon(self) -> None:
        """Give the terminal its cursor back; the process ends at once, and nothing else may be done."""
        if self._bars is not None:
            os.write(sys.stderr.fileno(), b"\x1b[?25h\n")

    def clear(self) -> None:
        """Take the bar away."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def _update(self, words: str, done: int, total: int | None) -> None:
        if not self.live:
            return
        if self._bars is None:
            self._start()
        self._bars.update(self._task, description=words, completed=done, total=total)

    def _start(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
        )
        self._bars = Progress(*columns, console=Console(stderr=True, highlight=False), transient=True)
        self._task = self._bars.add_task(self._words, total=None)
        self._bars.start()
