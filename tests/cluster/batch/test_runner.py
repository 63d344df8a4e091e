"""Tests for retries and dead workers in a batch, with a scripted worker pool."""

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from anyaccel.cluster.batch.image_worker import RowFailed, RowImage, WorkerFacts, WorkerSettings
from anyaccel.cluster.batch.local_worker_pool import Event, RowsFinished, WorkerDied, WorkerStarted, WorkerStartFailed
from anyaccel.cluster.batch.manifest import OutputFolder
from anyaccel.cluster.batch.rows import BatchRow
from anyaccel.cluster.batch.runner import BatchRun, BatchSummary
from anyaccel.errors import AnyaccelError, ModelError, UsageError
from anyaccel.progress import ProgressListener

Behavior = Callable[[int, BatchRow, int], str | None]
"""Outcome for a worker, row and attempt: None for an image, "dies" if the worker dies, any other text for an error."""


class ScriptedPool:
    """Worker pool with scripted outcomes, one event at a time."""

    def __init__(
        self, behavior: Behavior, rows_per_call: int = 1, start_event: Callable[[int], Event | None] = lambda _: None
    ) -> None:
        self.behavior, self.rows_per_call, self.start_event = behavior, rows_per_call, start_event
        self.events: deque[Event] = deque()
        self.queues: dict[int, deque[list[BatchRow]]] = {}
        self.calls: list[tuple[int, list[int]]] = []
        self.attempts: dict[int, int] = {}
        self.settings: list[WorkerSettings] = []
        self.stopped = False

    def start(self, worker: int, settings: WorkerSettings) -> None:
        self.settings.append(settings)
        self.queues[worker] = deque()
        facts = WorkerFacts(
            pipeline="SomePipeline", parameters=("prompt", "width"), revision="r", device=f"cpu:{worker}",
            virtual=False, dtype="float32", rows_per_call=self.rows_per_call, load_s=0.0,
        )  # fmt: skip
        self.events.append(self.start_event(worker) or WorkerStarted(worker, facts))

    def submit(self, worker: int, rows: Sequence[BatchRow]) -> None:
        self.queues[worker].append(list(rows))

    def wait(self, seconds: float) -> list[Event]:
        if self.events:
            return [self.events.popleft()]
        return [self._run_next(worker) for worker, queue in list(self.queues.items()) if queue]

    def stop(self) -> None:
        self.stopped = True

    def _run_next(self, worker: int) -> Event:
        rows = self.queues[worker].popleft()
        self.calls.append((worker, [row.number for row in rows]))
        outcomes: list[RowImage | RowFailed] = []
        for row in rows:
            self.attempts[row.number] = self.attempts.get(row.number, 0) + 1
            outcome = self.behavior(worker, row, self.attempts[row.number])
            if outcome == "dies":
                del self.queues[worker]
                return WorkerDied(worker, "killed")
            image = RowImage(row=row.number, content=b"p", device="cpu:0", dtype="float32", seconds=0.1)
            outcomes.append(image if outcome is None else RowFailed(row=row.number, error=outcome))
        return RowsFinished(worker, outcomes)


class RecordingListener(ProgressListener):
    """Listener that records warnings and the last progress text."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.last = ""

    def on_row(self, done: int, total: int, text: str) -> None:
        self.last = text

    def on_warning(self, text: str) -> None:
        self.warnings.append(text)


def run_batch(
    folder: Path, pool: ScriptedPool, rows: Sequence[BatchRow], workers: int = 2
) -> tuple[BatchSummary, RecordingListener, OutputFolder]:
    listener = RecordingListener()
    with OutputFolder(folder, {"model": "embedded"}) as output:
        return BatchRun(output, rows, pool, [WorkerSettings()] * workers, listener).run(), listener, output


def rows(count: int, **call: object) -> list[BatchRow]:
    return [BatchRow(number=n + 1, prompt="x", seed=n, call=call) for n in range(count)]


def test_every_row_runs_once(tmp_path: Path) -> None:
    pool = ScriptedPool(lambda *_: None)
    summary, listener, _ = run_batch(tmp_path, pool, rows(9))
    assert (summary.done, summary.failed, summary.made) == (9, 0, 9)
    assert pool.stopped
    assert sorted(number for _, numbers in pool.calls for number in numbers) == list(range(1, 10))
    assert {worker for worker, _ in pool.calls} == {0, 1}
    assert "per minute" in listener.last
    second_pool = ScriptedPool(lambda *_: None)
    summary, _, _ = run_batch(tmp_path, second_pool, rows(9))
    assert (summary.done, summary.made, second_pool.settings) == (9, 0, []), "no worker starts if nothing is left to do"


def test_a_failed_row_is_retried_on_another_worker(tmp_path: Path) -> None:
    pool = ScriptedPool(lambda worker, row, attempt: "no" if row.number == 3 and attempt == 1 else None)
    summary, _, _ = run_batch(tmp_path, pool, rows(6))
    assert (summary.done, summary.failed) == (6, 0)
    first, second = [worker for worker, numbers in pool.calls if 3 in numbers]
    assert first != second


def test_a_row_that_fails_twice_is_reported_and_the_others_continue(tmp_path: Path) -> None:
    pool = ScriptedPool(lambda worker, row, attempt: "too large" if row.number == 2 else None)
    summary, listener, folder = run_batch(tmp_path, pool, rows(5))
    assert (summary.done, summary.failed) == (4, 1)
    assert folder.entries[2]["error"] == "too large"
    assert listener.warnings == ["line 2 failed and is retried: too large", "line 2 failed: too large"]
    assert pool.attempts[2] == 2


def test_a_dead_worker_is_replaced_and_its_rows_run_again(tmp_path: Path) -> None:
    pool = ScriptedPool(lambda worker, row, attempt: "dies" if row.number in (2, 5) and attempt == 1 else None)
    summary, listener, _ = run_batch(tmp_path, pool, rows(8))
    assert (summary.done, summary.failed) == (8, 0)
    assert len(pool.settings) == 4
    assert all("died (killed) and is replaced" in warning for warning in listener.warnings)


def test_a_row_that_kills_workers_fails_and_the_others_do_not(tmp_path: Path) -> None:
    pool = ScriptedPool(lambda worker, row, attempt: "dies" if row.number == 2 else None)
    summary, _, folder = run_batch(tmp_path, pool, rows(12), workers=1)
    assert (summary.done, summary.failed) == (11, 1)
    assert "5 workers died while generating this row (last: killed" in folder.entries[2]["error"]


def test_rows_of_the_same_shape_share_a_call_and_retries_run_alone(tmp_path: Path) -> None:
    mixed = [*rows(4, width=8), *(BatchRow(number=n, prompt="x", seed=n, call={}) for n in range(5, 8))]
    pool = ScriptedPool(
        lambda worker, row, attempt: "no" if row.number == 6 and attempt == 1 else None, rows_per_call=4
    )
    summary, _, _ = run_batch(tmp_path, pool, mixed, workers=1)
    assert summary.done == 7
    assert [numbers for _, numbers in pool.calls] == [[1, 2, 3, 4], [5, 6, 7], [6]]


def test_an_unknown_argument_ends_the_batch_before_any_row_runs(tmp_path: Path) -> None:
    pool = ScriptedPool(lambda *_: None)
    with pytest.raises(UsageError, match="unknown argument 'height' for SomePipeline"):
        run_batch(tmp_path, pool, rows(2, height=8))
    assert pool.calls == []
    assert pool.stopped


def test_a_model_that_cannot_be_loaded_ends_the_batch(tmp_path: Path) -> None:
    pool = ScriptedPool(
        lambda *_: None, start_event=lambda worker: WorkerStartFailed(worker, ModelError("no model", hint="look"))
    )
    with pytest.raises(ModelError, match="no model"):
        run_batch(tmp_path, pool, rows(2))
    assert pool.stopped


def test_a_device_that_is_not_available_is_reported_and_the_others_continue(tmp_path: Path) -> None:
    error = AnyaccelError("no such device", hint="look")
    pool = ScriptedPool(
        lambda *_: None, start_event=lambda worker: WorkerStartFailed(worker, error) if worker == 1 else None
    )
    summary, listener, _ = run_batch(tmp_path, pool, rows(4))
    assert summary.done == 4
    assert "worker 1 failed to start" in listener.warnings[0]


def test_workers_that_never_start_end_the_batch(tmp_path: Path) -> None:
    pool = ScriptedPool(lambda *_: None, start_event=lambda worker: WorkerDied(worker, "killed by SIGKILL"))
    with pytest.raises(AnyaccelError, match="workers failed to start 10 times in a row: killed by SIGKILL"):
        run_batch(tmp_path, pool, rows(2), workers=2)
    assert len(pool.settings) == 20, "10 starts for each of the two workers"
