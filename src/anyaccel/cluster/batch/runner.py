"""A batch: rows over workers until each has its picture or its error, whoever dies on the way."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from anyaccel.cluster.batch.image_worker import RowFailed, RowImage, WorkerFacts, WorkerSettings
from anyaccel.cluster.batch.manifest import OutputFolder
from anyaccel.cluster.batch.rows import BatchRow, check_parameters
from anyaccel.cluster.batch.worker_pool import (
    Event,
    RowsFinished,
    WorkerDied,
    WorkerPool,
    WorkerStarted,
    WorkerStartFailed,
)
from anyaccel.errors import AnyaccelError
from anyaccel.progress import ProgressListener

__all__ = ["BatchRun", "BatchSummary"]

_WAIT_S = 0.5
_AHEAD = 2
"""What a worker has to do and what it does next, so that it never waits for the leader."""
_TRIES = 2
"""How often a row may fail."""
_DEATHS = 5
"""How many workers may die of a row, as far as one can see, before it is not tried again."""
_VAIN_STARTS = 10
"""How often a worker may die before it has its model, if meanwhile nobody makes a picture."""


@dataclass(eq=False)
class _RowTask:
    """A row, and what became of it so far."""

    row: BatchRow
    errors: int = 0
    deaths: int = 0
    failed_on: int | None = None
    """The worker on which it failed last: another one tries it again."""


@dataclass
class _WorkerState:
    settings: WorkerSettings
    facts: WorkerFacts | None = None
    queue: deque[list[_RowTask]] = field(default_factory=deque)
    """What it was given and has not done, in turn."""
    failed_starts: int = 0
    gone: bool = False
    """Given up."""


@dataclass(frozen=True, kw_only=True)
class BatchSummary:
    """How it ended."""

    rows: int
    done: int
    failed: int
    made: int
    """Of those that are done, how many this start has made."""
    seconds: float


class BatchRun:
    """Leads a crew through the rows of a folder."""

    def __init__(
        self,
        folder: OutputFolder,
        rows: Sequence[BatchRow],
        crew: WorkerPool,
        workers: Sequence[WorkerSettings],
        listener: ProgressListener,
    ) -> None:
        self.folder, self.rows, self.crew, self.listener = folder, rows, crew, listener
        self.tasks = deque(_RowTask(row) for row in folder.find_open(rows))
        self.workers = {number: _WorkerState(settings) for number, settings in enumerate(workers)}
        self.over = len(rows) - len(self.tasks)
        self.made = self.failed = 0
        self.began = self.working_since = time.monotonic()

    def run(self) -> BatchSummary:
        """Make what is open; what was made stays, however this ends."""
        self.listener.on_start(self.over, len(self.rows))
        try:
            if self.tasks:
                self.listener.on_phase("loading the model")
                for number in self.workers:
                    self._start(number)
            while self.tasks or any(worker.queue for worker in self.workers.values()):
                for event in self.crew.wait(_WAIT_S):
                    self._handle(event)
                self._feed()
        finally:
            self.crew.stop()
        return BatchSummary(
            rows=len(self.rows),
            done=self.over - self.failed,
            failed=self.failed,
            made=self.made,
            seconds=time.monotonic() - self.began,
        )

    def _start(self, number: int) -> None:
        worker = self.workers[number]
        self.crew.start(number, worker.settings)

    def _handle(self, event: Event) -> None:
        handlers: dict[type, Callable[..., None]] = {
            WorkerStarted: self._on_started,
            RowsFinished: self._on_finished,
            WorkerStartFailed: self._on_start_failed,
            WorkerDied: self._on_died,
        }
        handlers[type(event)](event)

    def _on_started(self, event: WorkerStarted) -> None:
        facts = event.facts
        check_parameters((task.row for task in self.tasks), facts.parameters, facts.pipeline)
        for name in ("revision", "dtype"):
            before = self.folder.settle(name, getattr(facts, name))
            if before != getattr(facts, name):
                raise AnyaccelError(
                    f"worker {event.worker} has another {name} than the run: {getattr(facts, name)}, not {before}",
                    hint="take another folder with --out, or the model that it was begun with",
                )
        self.workers[event.worker].facts = facts
        virtual = ", virtual: nothing here is about hardware" if facts.virtual else ""
        self.listener.on_message(f"worker {event.worker}: {facts.pipeline} on {facts.device} in {facts.dtype}{virtual}")
        self.listener.on_phase("rows")
        if self.made == 0:
            self.working_since = time.monotonic()

    def _on_finished(self, event: RowsFinished) -> None:
        worker = self.workers[event.worker]
        tasks = {task.row.number: task for task in worker.queue.popleft()}
        for outcome in event.outcomes:
            task = tasks.pop(outcome.row)
            if isinstance(outcome, RowImage):
                self._keep(task, outcome, event.worker)
            else:
                self._on_refused(task, outcome, event.worker)
        for other in self.workers.values():
            other.failed_starts = 0

    def _keep(self, task: _RowTask, made: RowImage, worker: int) -> None:
        facts = {"device": made.device, "dtype": made.dtype, "seconds": made.seconds, "worker": worker}
        self.folder.add_picture(task.row, made.content, facts)
        self.made += 1
        self._end_row()

    def _on_refused(self, task: _RowTask, refused: RowFailed, worker: int) -> None:
        task.errors += 1
        task.failed_on = worker
        if task.errors < _TRIES:
            self.listener.on_warning(f"line {task.row.number} failed, and is tried once more: {refused.error}")
            self.tasks.append(task)
            return
        self._fail(task, refused.error, worker)

    def _fail(self, task: _RowTask, error: str, worker: int) -> None:
        self.folder.add_failure(task.row, error, {"worker": worker})
        self.failed += 1
        self.listener.on_warning(f"line {task.row.number} failed: {error}")
        self._end_row()

    def _end_row(self) -> None:
        self.over += 1
        left = len(self.rows) - self.over
        seconds = max(time.monotonic() - self.working_since, 1e-9)
        rate = (self.made + self.failed) / seconds
        words = f"{rate * 60:.3g} a minute, {_as_time(left / rate)} left" if left else f"{rate * 60:.3g} a minute"
        failed = f", {self.failed} failed" if self.failed else ""
        self.listener.on_row(self.over, len(self.rows), f"{words}{failed}")

    def _on_start_failed(self, event: WorkerStartFailed) -> None:
        """A worker that cannot begin: with others at work it is given up, else there is no use in going on."""
        worker = self.workers[event.worker]
        worker.gone = True
        if any(other.facts for other in self.workers.values()):
            self.listener.on_warning(f"worker {event.worker} cannot begin, and the others go on: {event.error.message}")
            return
        raise event.error

    def _on_died(self, event: WorkerDied) -> None:
        """Give what it had to others; it began the first of it, which may be what it died of."""
        worker = self.workers[event.worker]
        if worker.gone:
            return
        waiting = list(worker.queue)
        worker.queue.clear()
        ready, worker.facts = worker.facts is not None, None
        for place, tasks in enumerate(waiting):
            for task in tasks:
                task.deaths += place == 0
                if task.deaths < _DEATHS:
                    self.tasks.append(task)
                else:
                    self._fail(task, f"{_DEATHS} workers died of it; the last: {event.reason}", event.worker)
        worker.failed_starts += not ready
        self.listener.on_warning(f"worker {event.worker} is gone ({event.reason}), and another takes its place")
        if worker.failed_starts < _VAIN_STARTS:
            self._start(event.worker)
            return
        worker.gone = True
        left = [number for number, other in self.workers.items() if not other.gone]
        if not left:
            raise AnyaccelError(
                f"no worker can begin: {event.reason}, {_VAIN_STARTS} times in a row",
                hint="is there memory for the model? `anyaccel explain` says how much it needs",
            )

    def _feed(self) -> None:
        ready = sum(worker.facts is not None for worker in self.workers.values())
        for number, worker in self.workers.items():
            while worker.facts is not None and len(worker.queue) < (_AHEAD if len(self.tasks) >= ready else 1):
                tasks = self._take(number, worker.facts.rows_a_call)
                if not tasks:
                    break
                worker.queue.append(tasks)
                self.crew.give(number, [task.row for task in tasks])

    def _take(self, number: int, most: int) -> list[_RowTask]:
        """The next rows of one shape; one that failed or killed goes alone, and to another worker if there is one."""
        alone = sum(worker.facts is not None for worker in self.workers.values()) < 2
        first = next((task for task in self.tasks if alone or task.failed_on != number), None)
        if first is None:
            return []
        taken = [first]
        if not first.errors and not first.deaths and most > 1:
            fresh = (task for task in self.tasks if not task.errors and not task.deaths and task is not first)
            taken += islice((task for task in fresh if task.row.shape == first.row.shape), most - 1)
        for task in taken:
            self.tasks.remove(task)
        return taken


def _as_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
