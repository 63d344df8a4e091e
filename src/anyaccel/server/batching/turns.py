"""Calls that share models: most run at the same time, some must run alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Turns"]


class Turns:
    """A lock that many threads can hold together, or one thread alone."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._together = 0
        self._waiting_alone = 0
        self._alone = False

    @contextmanager
    def take(self, *, alone: bool) -> Iterator[None]:
        """Hold the lock inside the `with` block; a thread that waits to hold it alone is served first."""
        with self._changed:
            if alone:
                self._waiting_alone += 1
                try:
                    self._changed.wait_for(lambda: not self._alone and not self._together)
                    self._alone = True
                finally:
                    self._waiting_alone -= 1
                    self._changed.notify_all()
            else:
                self._changed.wait_for(lambda: not self._alone and not self._waiting_alone)
                self._together += 1
        try:
            yield
        finally:
            with self._changed:
                if alone:
                    self._alone = False
                else:
                    self._together -= 1
                self._changed.notify_all()
