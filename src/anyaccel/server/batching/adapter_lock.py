"""Lock for model calls, shared by calls with the same LoRA adapter or held by one exclusive call."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from anyaccel.progress import StoppedError

__all__ = ["AdapterLock"]

# Seconds between two checks of a waiting call for cancellation.
_POLL_S = 0.2


class AdapterLock:
    """FIFO lock that up to `max_holders` model calls with the same LoRA adapter can hold at the same time.

    If the next call uses a different adapter, `switch` is called with that adapter while no call holds
    the lock.
    """

    def __init__(self, max_holders: int, switch: Callable[[str | None], None] = lambda adapter: None) -> None:
        self.max_holders, self.switch = max_holders, switch
        self.changed = threading.Condition()
        self.waiting: deque[object] = deque()
        self.holders = 0
        self.adapter: str | None = None
        self.exclusive = False

    @contextmanager
    def acquire(
        self, adapter: str | None = None, *, exclusive: bool = False, is_stopped: Callable[[], bool] = lambda: False
    ) -> Iterator[None]:
        """Acquire the lock for `adapter`, and release it at the end of the `with` block.

        An exclusive call waits until no other call holds the lock. Raises `StoppedError` if `is_stopped`
        returns true while the call is waiting.
        """
        ticket = object()
        with self.changed:
            self.waiting.append(ticket)
            try:
                # Only the head of the queue may proceed: otherwise a steady stream of calls with the current adapter
                # would starve one that needs another adapter.
                while self.waiting[0] is not ticket or not self._is_available(adapter, exclusive):
                    if is_stopped():
                        raise StoppedError
                    self.changed.wait(_POLL_S)
                if self.adapter != adapter:
                    self.switch(adapter)
                    self.adapter = adapter
                self.holders, self.exclusive = self.holders + 1, exclusive
            finally:
                self.waiting.remove(ticket)
                self.changed.notify_all()
        try:
            yield
        finally:
            with self.changed:
                self.holders, self.exclusive = self.holders - 1, False
                self.changed.notify_all()

    def _is_available(self, adapter: str | None, exclusive: bool) -> bool:
        if self.holders == 0:
            return True
        return not exclusive and not self.exclusive and adapter == self.adapter and self.holders < self.max_holders

    def is_idle(self) -> bool:
        """Return whether no call holds the lock and none is waiting for it."""
        with self.changed:
            return self.holders == 0 and not self.waiting
