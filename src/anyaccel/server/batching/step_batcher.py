"""Step batching: denoiser calls from concurrent pipeline calls run as one batch.

Each request runs an unmodified pipeline call in its own thread. An override of the model's forward
method delays each call while other threads are about to call the same model. The inputs of the
waiting calls, each at its own timestep, are then concatenated, and each call receives its rows of
the output. One of the waiting threads runs the batch for all of them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from anyaccel.runtime.workarounds.nan_check import RecordEvent

__all__ = ["StepBatcher"]

_MIN_WAIT_S, _MAX_WAIT_S, _SLOT_TIMEOUT_S = 0.005, 0.5, 0.005


@dataclass(frozen=True, eq=False)
class _EnqueuedBatch:
    """A batch enqueued on the device, together with any other work enqueued before the next batch."""

    started_at: float
    wait: Callable[[], None]
    """Blocks until the device has finished it."""


class StepBatcher:
    """Scheduling state shared by all batched models of one pipeline.

    A call waits for other calls for at most `max_wait_s` seconds after the device becomes idle; the
    default is half the duration of the last batch.

    Accelerators run asynchronously. `mark` records an event after the work enqueued so far and returns
    a function that waits for that event. With `exact=True`, the event does not depend on work that is
    enqueued later. The next batch can then be enqueued while the device runs the current one, so the
    device does not become idle between them. At most one batch is enqueued ahead: otherwise, all steps
    of the running calls would be enqueued before a new request arrives, and the request could not join
    them.
    """

    def __init__(
        self, *, max_calls: int, max_wait_s: float | None = None, mark: RecordEvent | None = None, exact: bool = True
    ) -> None:
        self.max_calls, self.max_wait_s, self.mark = max_calls, max_wait_s, mark
        # Maximum number of unfinished batches on the device when the next one is enqueued.
        self.look_ahead = 1 if exact else 0
        # Guards all fields below except the GIL slot.
        self.changed = threading.Condition()
        # Whether a thread is enqueuing work; on the CPU, running it.
        self.busy = False
        # The last enqueued batches that may be unfinished.
        self.enqueued: deque[_EnqueuedBatch] = deque(maxlen=2)
        # Whether a thread is waiting for the device.
        self.synchronizing = False
        # Whether a batch finished and the thread that waited for it has not notified the others yet.
        self.pending_notify = False
        self.idle_since, self.last_batch_s = 0.0, 0.0
        self.gil_slot = threading.Lock()
        self.slot_owner: int | None = None
        self.slot_releases = 0
        # Running pipeline calls by thread id, oldest first, with the override of the model that each called last.
        self.active_calls: dict[int, object] = {}

    @contextmanager
    def participating(self) -> Iterator[None]:
        """Register the current thread's pipeline call for the duration of the `with` block.

        Batches wait for the model calls of registered pipeline calls.
        """
        thread_id = threading.get_ident()
        with self.changed:
            self.active_calls[thread_id] = None
        try:
            yield
        finally:
            self.release_gil_slot()
            with self.changed:
                self.active_calls.pop(thread_id, None)
                if not self.active_calls:
                    self.enqueued.clear()
                self.changed.notify_all()

    def acquire_gil_slot(self) -> None:
        """Acquire the slot that lets only one thread at a time continue after a batch.

        Without the slot, all threads of a batch would continue at the same time and compete for the GIL. If
        they alternate after every operation, the Python code between two batches takes about twice as long.
        The method returns without the slot if the thread that holds it seems to be blocked.
        """
        releases = -1
        # Give up only if the slot was not released during a whole timeout: its owner is then blocked elsewhere.
        while releases != self.slot_releases:
            releases = self.slot_releases
            if self.gil_slot.acquire(timeout=_SLOT_TIMEOUT_S):
                self.slot_owner = threading.get_ident()
                return

    def release_gil_slot(self) -> None:
        """Release the GIL slot if the current thread holds it; do nothing otherwise."""
        if self.slot_owner == threading.get_ident():
            self.slot_owner, self.slot_releases = None, self.slot_releases + 1
            self.gil_slot.release()

    def is_participating(self) -> bool:
        """Return whether the current thread has registered a pipeline call with `participating`."""
        return threading.get_ident() in self.active_calls

    def compute_max_wait(self) -> float:
        """Return the maximum number of seconds that a batch waits for more calls while the device is idle."""
        if self.max_wait_s is not None:
            return self.max_wait_s
        return min(_MAX_WAIT_S, max(_MIN_WAIT_S, self.last_batch_s / 2))

    @contextmanager
    def device_access(self) -> Iterator[None]:
        """Wait for exclusive access to the device, and hold it for the duration of the `with` block."""
        with self.changed:
            while self.busy:
                self.changed.wait()
            self.busy = True
        with self.releasing_device():
            yield

    @contextmanager
    def releasing_device(self, *, is_batch: bool = False) -> Iterator[None]:
        """Release exclusive access to the device at the end of the `with` block.

        The caller must set `busy` before entering the block. `is_batch` is true if the block enqueues a
        batch of denoiser calls.
        """
        started_at = time.monotonic()
        try:
            yield
        finally:
            with self.changed:
                self.busy = False
                self.changed.notify_all()
                if self.mark is None:
                    self._record_idle(started_at)
                elif self.active_calls:
                    self._record_enqueued(started_at, is_batch=is_batch)

    def _record_enqueued(self, started_at: float, *, is_batch: bool) -> None:
        """Record an event after the most recently enqueued work.

        Work other than a denoiser batch, such as a decoder call, is added to the previous batch, so it does
        not count toward the limit on batches enqueued ahead.
        """
        assert self.mark is not None
        if self.enqueued and not is_batch:
            self.enqueued[-1] = replace(self.enqueued[-1], wait=self.mark())
        else:
            self.enqueued.append(_EnqueuedBatch(started_at, self.mark()))

    def wait_for_oldest(self) -> None:
        """Wait until the device has finished the oldest enqueued batch.

        The caller must hold the lock, which is released during the wait. Other threads may enqueue work
        during the wait only if the batcher was created with `exact=True`. Otherwise, the wait would also
        include that work.
        """
        oldest, self.synchronizing, self.busy = self.enqueued[0], True, not self.look_ahead
        self.changed.release()
        try:
            oldest.wait()
        finally:
            self.changed.acquire()
            self.synchronizing = False
            if not self.look_ahead:
                self.busy = False
            # The deque may have dropped the batch in the meantime.
            if self.enqueued and self.enqueued[0] is oldest:
                self.enqueued.popleft()
            self._record_idle(oldest.started_at)
            self.pending_notify = True

    def notify_if_pending(self) -> None:
        """Wake all waiting threads if a batch has finished and they have not been notified yet."""
        # Deferred until here: waking all threads costs GIL time, and this thread often runs the next batch itself.
        if self.pending_notify:
            self.pending_notify = False
            self.changed.notify_all()

    def _record_idle(self, started_at: float) -> None:
        now = time.monotonic()
        self.last_batch_s, self.idle_since = now - max(started_at, self.idle_since), now
