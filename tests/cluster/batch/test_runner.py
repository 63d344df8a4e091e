"""How a batch is led: who does what again, with workers whose ends are written down."""

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from anyaccel.cluster.batch.image_worker import RowFailed, RowImage, WorkerFacts, WorkerSettings
from anyaccel.cluster.batch.manifest import OutputFolder
from anyaccel.cluster.batch.rows import BatchRow
from anyaccel.cluster.batch.runner import BatchRun, BatchSummary
from anyaccel.cluster.batch.worker_pool import Event, RowsFinished, WorkerDied, WorkerStarted, WorkerStartFailed
from anyaccel.errors import AnyaccelError, ModelError, UsageError
from anyaccel.progress import ProgressListener

Doing = Callable[[int, BatchRow, int], str | None]
"""What becomes of a row on a worker at a try: None is a picture, `dies` the worker's end, anything else an error."""


class Script:
    """A crew that does as it is told, one thing at a time."""

    def __init__(self, doing: Doing, rows_a_call: int = 1, beginning: Callable[[int], Event | None] = lambda _: None):
        self.doing, self.rows_a_call, self.beginning = doing, rows_a_call, beginning
        self.events: deque[Event] = deque()
        self.queues: dict[int, deque[list[BatchRow]]] = {}
        self.made: list[tuple[int, list[int]]] = []
        self.tries: dict[int, int] = {}
        self.settings: list[WorkerSettings] = []
        self.stopped = False

    def start(self, worker: int, settings: WorkerSettings) -> None:
        self.settings.append(settings)
        self.queues[worker] = deque()
        facts = WorkerFacts(
            pipeline="SomePipeline", parameters=("prompt", "width"), revision="r", device=f"cpu:{worker}",
            virtual=False, dtype="float32", rows_a_call=self.rows_a_call, load_s=0.0,
        )  # fmt: skip
        self.events.append(self.beginning(worker) or WorkerStarted(worker, facts))

    def give(self, worker: int, rows: Sequence[BatchRow]) -> None:
        self.queues[worker].append(list(rows))

    def wait(self, seconds: float) -> list[Event]:
        if self.events:
            return [self.events.popleft()]
        return [self._do(worker) for worker, queue in list(self.queues.items()) if queue]

    def stop(self) -> None:
        self.stopped = True

    def _do(self, worker: int) -> Event:
        rows = self.queues[worker].popleft()
        self.made.append((worker, [row.number for row in rows]))
        outcomes: list[RowImage | RowFailed] = []
        for row in rows:
            self.tries[row.number] = self.tries.get(row.number, 0) + 1
            became = self.doing(worker, row, self.tries[row.number])
            if became == "dies":
                del self.queues[worker]
                return WorkerDied(worker, "it was killed")
            made = RowImage(row=row.number, content=b"p", device="cpu:0", dtype="float32", seconds=0.1)
            outcomes.append(made if became is None else RowFailed(row=row.number, error=became))
        return RowsFinished(worker, outcomes)


class ModelCallRecord(ProgressListener):
    """What a listener hears."""

    def __init__(self) -> None:
        self.troubles: list[str] = []
        self.last = ""

    def on_row(self, done: int, total: int, text: str) -> None:
        self.last = text

    def on_warning(self, text: str) -> None:
        self.troubles.append(text)


def lead(
    folder: Path, crew: Script, rows: Sequence[BatchRow], workers: int = 2
) -> tuple[BatchSummary, ModelCallRecord, OutputFolder]:
    heard = ModelCallRecord()
    with OutputFolder(folder, {"model": "embedded"}) as held:
        return BatchRun(held, rows, crew, [WorkerSettings()] * workers, heard).run(), heard, held


def rows(count: int, **call: object) -> list[BatchRow]:
    return [BatchRow(number=n + 1, prompt="x", seed=n, call=call) for n in range(count)]


def test_every_row_is_made_once(tmp_path: Path) -> None:
    crew = Script(lambda *_: None)
    summary, heard, _ = lead(tmp_path, crew, rows(9))
    assert (summary.done, summary.failed, summary.made) == (9, 0, 9)
    assert crew.stopped
    assert sorted(number for _, made in crew.made for number in made) == list(range(1, 10))
    assert {worker for worker, _ in crew.made} == {0, 1}
    assert "a minute" in heard.last
    again = Script(lambda *_: None)
    summary, _, _ = lead(tmp_path, again, rows(9))
    assert (summary.done, summary.made, again.settings) == (9, 0, []), "nobody is started for nothing"


def test_a_row_that_fails_is_tried_once_more_on_another_worker(tmp_path: Path) -> None:
    crew = Script(lambda worker, row, tries: "no" if row.number == 3 and tries == 1 else None)
    summary, _, _ = lead(tmp_path, crew, rows(6))
    assert (summary.done, summary.failed) == (6, 0)
    first, second = [worker for worker, made in crew.made if 3 in made]
    assert first != second


def test_a_row_that_fails_twice_is_told_and_the_rest_goes_on(tmp_path: Path) -> None:
    crew = Script(lambda worker, row, tries: "too large" if row.number == 2 else None)
    summary, heard, folder = lead(tmp_path, crew, rows(5))
    assert (summary.done, summary.failed) == (4, 1)
    assert folder.entries[2]["error"] == "too large"
    assert heard.troubles == ["line 2 failed, and is tried once more: too large", "line 2 failed: too large"]
    assert crew.tries[2] == 2


def test_a_worker_that_dies_is_replaced_and_loses_nothing(tmp_path: Path) -> None:
    crew = Script(lambda worker, row, tries: "dies" if row.number in (2, 5) and tries == 1 else None)
    summary, heard, _ = lead(tmp_path, crew, rows(8))
    assert (summary.done, summary.failed) == (8, 0)
    assert len(crew.settings) == 4
    assert all("another takes its place" in trouble for trouble in heard.troubles)


def test_a_row_that_kills_is_given_up_and_nobody_else_is_blamed(tmp_path: Path) -> None:
    crew = Script(lambda worker, row, tries: "dies" if row.number == 2 else None)
    summary, _, folder = lead(tmp_path, crew, rows(12), workers=1)
    assert (summary.done, summary.failed) == (11, 1)
    assert "5 workers died of it" in folder.entries[2]["error"]


def test_rows_of_one_shape_are_made_together_and_suspects_alone(tmp_path: Path) -> None:
    mixed = [*rows(4, width=8), *(BatchRow(number=n, prompt="x", seed=n, call={}) for n in range(5, 8))]
    crew = Script(lambda worker, row, tries: "no" if row.number == 6 and tries == 1 else None, rows_a_call=4)
    summary, _, _ = lead(tmp_path, crew, mixed, workers=1)
    assert summary.done == 7
    assert [made for _, made in crew.made] == [[1, 2, 3, 4], [5, 6, 7], [6]]


def test_an_unknown_parameter_ends_it_before_any_picture(tmp_path: Path) -> None:
    crew = Script(lambda *_: None)
    with pytest.raises(UsageError, match="takes no height"):
        lead(tmp_path, crew, rows(2, height=8))
    assert crew.made == []
    assert crew.stopped


def test_a_model_that_cannot_be_loaded_ends_it(tmp_path: Path) -> None:
    crew = Script(
        lambda *_: None, beginning=lambda worker: WorkerStartFailed(worker, ModelError("no model", hint="look"))
    )
    with pytest.raises(ModelError, match="no model"):
        lead(tmp_path, crew, rows(2))
    assert crew.stopped


def test_one_device_that_cannot_be_had_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    broken = AnyaccelError("no such device", hint="look")
    crew = Script(lambda *_: None, beginning=lambda worker: WorkerStartFailed(worker, broken) if worker == 1 else None)
    summary, heard, _ = lead(tmp_path, crew, rows(4))
    assert summary.done == 4
    assert "worker 1 cannot begin" in heard.troubles[0]


def test_workers_that_never_begin_end_it(tmp_path: Path) -> None:
    crew = Script(lambda *_: None, beginning=lambda worker: WorkerDied(worker, "it was killed by SIGKILL"))
    with pytest.raises(AnyaccelError, match="no worker can begin: it was killed by SIGKILL, 10 times"):
        lead(tmp_path, crew, rows(2), workers=2)
    assert len(crew.settings) == 20, "each of the two was tried"
