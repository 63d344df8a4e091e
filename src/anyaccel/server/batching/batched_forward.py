"""Override of a model's forward method that runs concurrent calls as one batch.

`StepBatcher` holds the state that the batched models of a pipeline share.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from anyaccel.forward_overrides import Slot, run_beneath
from anyaccel.runtime.module_fingerprint import ModuleFingerprint
from anyaccel.server.batching.batched_args import CallArgs, join_args, make_call_args, results_match, split_result
from anyaccel.server.batching.step_batcher import StepBatcher

__all__ = ["BatchStats", "BatchedForward"]

_LOG = logging.getLogger(__name__)

_Forward = Callable[..., Any]
# Runs per prepared batch size: the first one compiles and the third one is captured as a graph.
_WARM_UP_RUNS = 4


@dataclass(eq=False)
class _PendingCall:
    """A model call that is waiting to run as part of a batch."""

    args: CallArgs
    thread_id: int
    enqueued_at: float
    claimed: bool = False
    """Whether a thread has put the call into a batch."""
    done: bool = False
    resolved: bool = False
    """Whether `result` or `error` is set."""
    result: Any = None
    error: Exception | None = None


@dataclass
class BatchStats:
    """Counts of the batches and calls that one model has run."""

    batches: int = 0
    calls: int = 0
    largest: int = 0
    unbatched: int = 0
    """Calls with arguments that cannot be joined."""
    sizes: dict[int, int] = field(default_factory=dict)
    """Number of batches by their number of calls."""

    def record(self, calls: int) -> None:
        """Add a batch of `calls` calls to the statistics."""
        self.batches, self.calls, self.largest = self.batches + 1, self.calls + calls, max(self.largest, calls)
        self.sizes[calls] = self.sizes.get(calls, 0) + 1


class BatchedForward:
    """Override of a model's forward method that runs concurrent calls as one batch."""

    def __init__(
        self, module: torch.nn.Module, batcher: StepBatcher, *, enabled: bool = True, is_denoiser: bool = True
    ) -> None:
        self.module, self.batcher, self.enabled = module, batcher, enabled
        # A denoiser is called again for the next step. After another model, such as a decoder, the thread may wait for
        # the device, so it must not hold the GIL slot.
        self.is_denoiser = is_denoiser
        self.pending: list[_PendingCall] = []
        # Arguments of the first call of this model in each pipeline call; None if they are not recorded.
        self.recorded_args: list[CallArgs] | None = None
        # State of the model, which is checked while arguments are recorded.
        self.fingerprint: ModuleFingerprint | None = None
        self._changed = False
        # Arguments for the batches that `prepare_batch_sizes` runs.
        self.example_args: CallArgs | None = None
        # Allowed batch sizes in rows, with the measured seconds per batch. Empty if every size is allowed.
        self.batch_seconds: dict[int, float] = {}
        self.stats = BatchStats()

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's original, compiled or graph-captured forward method without batching."""
        return run_beneath(self.module, Slot.BATCHING, args, kwargs)

    def has_changed(self) -> bool:
        """Return whether the model has changed since `fingerprint` was taken, now or when it ran."""
        return self._changed or (self.fingerprint is not None and not self.fingerprint.holds())

    def matches_unbatched(self, calls: list[CallArgs]) -> bool:
        """Return whether two calls produce matching results with and without batching.

        Returns False if the two calls cannot be batched or the model raises an exception.
        """
        if len(calls) != 2 or not calls[0].can_join(calls[1]):
            return False
        try:
            with torch.no_grad(), self.batcher.device_access():
                expected = [self.run(*args, **kwargs) for args, kwargs in (join_args([call]) for call in calls)]
                args, kwargs = join_args(calls)
                results = split_result(self.run(*args, **kwargs), [call.rows for call in calls])
        except Exception as error:  # noqa: BLE001 - the model then runs without batching
            _LOG.debug("anyaccel: calls to %s are not batched: %r", type(self.module).__name__, error)
            return False
        return all(results_match(batched, unbatched) for batched, unbatched in zip(results, expected, strict=True))

    def prepare_batch_sizes(self, sizes: Sequence[int]) -> None:
        """Run and time one batch for each number of calls in `sizes`.

        Later batches are padded to one of these sizes.
        """
        assert self.example_args is not None
        for calls in sizes:
            rows = calls * self.example_args.rows
            args, kwargs = join_args([self.example_args], rows)
            with torch.no_grad(), self.batcher.device_access():
                self.batch_seconds[rows] = min(self._measure(args, kwargs) for _ in range(_WARM_UP_RUNS))

    def _measure(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        mark = self.batcher.mark or (lambda: lambda: None)
        mark()()  # synchronize: earlier work must not count
        start = time.monotonic()
        self.run(*args, **kwargs)
        mark()()
        return time.monotonic() - start

    def __call__(self, forward: _Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one model call, in a batch if possible, and return its output."""
        batcher = self.batcher
        # Calls outside `SharedPipeline.run` and calls with gradients are never batched.
        if not batcher.is_participating() or torch.is_grad_enabled():
            with batcher.device_access():
                return forward(*args, **kwargs)
        batcher.release_gil_slot()
        if self.recorded_args is not None:
            self._record_args(args, kwargs)
            self._changed = self.has_changed()
        call_args = make_call_args(args, kwargs) if self.enabled else None
        if call_args is None:
            return self._run_unbatched(args, kwargs)
        call = _PendingCall(call_args, threading.get_ident(), time.monotonic())
        self._enqueue(call)
        try:
            while not call.done:
                batch = self._wait_for_batch(call)
                if batch:
                    self._run_batch(batch)
        finally:
            if not call.claimed:
                self._withdraw(call)
        if self.is_denoiser:
            batcher.acquire_gil_slot()
        if call.error is not None:
            raise call.error
        return call.result

    def _record_args(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        is_first = self.batcher.active_calls.get(threading.get_ident()) is not self
        call_args = make_call_args(args, kwargs) if is_first else None
        if call_args is not None and self.recorded_args is not None:
            self.recorded_args.append(call_args)

    def _run_unbatched(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        batcher = self.batcher
        with batcher.changed:
            batcher.active_calls[threading.get_ident()] = self
            self.stats.unbatched += 1
            batcher.changed.notify_all()  # calls of the previous model may be waiting for this one
        with batcher.device_access():
            return self.run(*args, **kwargs)

    def _enqueue(self, call: _PendingCall) -> None:
        batcher = self.batcher
        with batcher.changed:
            if batcher.active_calls.get(call.thread_id) is not self:
                batcher.active_calls[call.thread_id] = self
                # Calls of the previous model may be waiting for this one. Calls of this model did not expect it.
                batcher.changed.notify_all()
            self.pending.append(call)

    def _withdraw(self, call: _PendingCall) -> None:
        """Remove a call from the queue after an exception, such as KeyboardInterrupt, has ended its wait."""
        with self.batcher.changed:
            if call in self.pending:
                self.pending.remove(call)
                self.batcher.changed.notify_all()

    def _wait_for_batch(self, call: _PendingCall) -> list[_PendingCall]:
        """Wait until another thread has run `call`, or until this thread must run a batch.

        Returns the batch to run, or an empty list if another thread has run the call. If all expected calls
        have arrived, the batch is returned while the device is still running the previous one. Otherwise,
        the thread waits for the missing calls until the device is idle, and then for up to
        `compute_max_wait()` seconds.
        """
        batcher = self.batcher
        with batcher.changed:
            while not call.done:
                timeout_s: float | None = None
                if not call.claimed and not batcher.busy:
                    ready = len(batcher.enqueued) <= batcher.look_ahead and self._all_arrived()
                    if batcher.enqueued and not ready:
                        # One thread waits for the device; the others sleep until it notifies them.
                        if not batcher.synchronizing:
                            batcher.wait_for_oldest()
                            continue
                    else:
                        timeout_s = (
                            max(call.enqueued_at, batcher.idle_since) + batcher.compute_max_wait() - time.monotonic()
                        )
                        if ready or timeout_s <= 0:
                            batch = self._claim_batch()
                            batcher.busy, batcher.pending_notify = True, False
                            return batch
                batcher.notify_if_pending()
                batcher.changed.wait(timeout_s)
            batcher.notify_if_pending()
        return []

    def _all_arrived(self) -> bool:
        """Return whether every call that is expected to join the next batch has arrived.

        A pipeline call is expected to join if this model is the last one that it called. If enough calls
        for a full batch have arrived, only the oldest pipeline calls are expected.
        """
        arrived, active = {call.thread_id for call in self.pending}, self.batcher.active_calls
        missing = {thread_id for thread_id, model in active.items() if model is self and thread_id not in arrived}
        return not missing or (len(arrived) >= self.batcher.max_calls and not missing & self._oldest_calls())

    def _oldest_calls(self) -> set[int]:
        """Return the thread IDs of the oldest pipeline calls, at most as many as fit into one batch."""
        return set(itertools.islice(self.batcher.active_calls, self.batcher.max_calls))

    def _claim_batch(self) -> list[_PendingCall]:
        """Remove the calls for the next batch from the queue and return them.

        The batch contains the first waiting call and other calls with compatible arguments. The oldest
        pipeline calls have priority. A newer one joins only if the batch is not full, for example because
        an older one is running its decoder. The remaining calls wait for a later batch, which another
        thread may run.
        """
        oldest_calls = self._oldest_calls()
        # The sort is stable, so both groups stay in order of arrival.
        waiting = sorted(self.pending, key=lambda call: call.thread_id not in oldest_calls)
        group = [call for call in waiting if call.args.can_join(waiting[0].args)][: self.batcher.max_calls]
        max_rows = self._best_batch_rows(sum(call.args.rows for call in group))
        batch, rows = [waiting[0]], waiting[0].args.rows
        for call in group[1:]:
            if rows + call.args.rows <= max_rows:
                batch.append(call)
                rows += call.args.rows
        for call in batch:
            call.claimed = True
            self.pending.remove(call)
        return batch

    def _best_batch_rows(self, rows: int) -> int:
        """Return the prepared batch size with the highest throughput for `rows` waiting rows.

        A large batch that is mostly padding may be slower than a smaller, full one. Returns `rows` if no
        batch sizes were prepared.
        """
        if not self.batch_seconds:
            return rows
        return max(self.batch_seconds, key=lambda size: min(rows, size) / self.batch_seconds[size])

    def _run_batch(self, batch: list[_PendingCall]) -> None:
        batcher = self.batcher
        with batcher.releasing_device(is_batch=self.is_denoiser):
            try:
                self._execute(batch)
            finally:
                with batcher.changed:
                    self.stats.record(len(batch))
                    for call in batch:
                        call.done = call.resolved or call.thread_id == threading.get_ident()
                    # A BaseException such as KeyboardInterrupt ends only the call of this thread. Return the others to
                    # the queue, where one of their threads runs them.
                    unresolved = [call for call in batch if not call.done]
                    for call in unresolved:
                        call.claimed = False
                    self.pending += unresolved

    def _execute(self, batch: list[_PendingCall]) -> None:
        """Run a batch and store each call's result or error.

        If the batch fails, each call runs separately, so that only the call that caused the error fails.
        """
        try:
            rows = [call.args.rows for call in batch]
            padded = next((size for size in self.batch_seconds if size >= sum(rows)), None)
            args, kwargs = join_args([call.args for call in batch], padded)
            results = split_result(self.run(*args, **kwargs), rows if padded is None else [*rows, padded - sum(rows)])
            for call, result in zip(batch, results, strict=False):  # the last result may be padding
                call.result, call.resolved = result, True
        except Exception as error:  # noqa: BLE001 - raised in the threads of the calls
            if len(batch) == 1:
                batch[0].error, batch[0].resolved = error, True
                return
            for call in batch:
                self._execute([call])
