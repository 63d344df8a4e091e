"""Who may use a model now: several at once where their calls are joined, or one alone; in the order of their coming."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from anyaccel.progress import StoppedError

__all__ = ["AdapterLock"]

_LOOK_S = 0.2
"""How often one that waits looks whether it is still wanted."""


class AdapterLock:
    """Lets calls in: those that need the same adapter together, as many as fit, and none past one that waits."""

    def __init__(self, at_once: int, switch: Callable[[str | None], None] = lambda adapter: None) -> None:
        self.at_once, self.switch = at_once, switch
        self.changed = threading.Condition()
        self.waiting: deque[object] = deque()
        self.inside = 0
        self.adapter: str | None = None
        self.alone = False

    @contextmanager
    def entering(
        self, adapter: str | None = None, *, alone: bool = False, is_stopped: Callable[[], bool] = lambda: False
    ) -> Iterator[None]:
        """Wait for one's turn; with `alone`, until nobody else is inside, and nobody comes in meanwhile."""
        me = object()
        with self.changed:
            self.waiting.append(me)
            try:
                while self.waiting[0] is not me or not self._may_enter(adapter, alone):
                    if is_stopped():
                        raise StoppedError
                    self.changed.wait(_LOOK_S)
                if self.adapter != adapter:
                    self.switch(adapter)
                    self.adapter = adapter
                self.inside, self.alone = self.inside + 1, alone
            finally:
                self.waiting.remove(me)
                self.changed.notify_all()
        try:
            yield
        finally:
            with self.changed:
                self.inside, self.alone = self.inside - 1, False
                self.changed.notify_all()

    def _may_enter(self, adapter: str | None, alone: bool) -> bool:
        if self.inside == 0:
            return True
        return not alone and not self.alone and adapter == self.adapter and self.inside < self.at_once

    def is_idle(self) -> bool:
        """Whether nobody is inside or waits."""
        with self.changed:
            return self.inside == 0 and not self.waiting
