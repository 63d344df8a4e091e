"""Stock diffusers and anyaccel side by side: the same picture in turns, and the ratio of their times."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from anyaccel.bench.case import FAST, OURS, STOCK, VARIANTS, BenchCase
from anyaccel.bench.failure_text import describe_death
from anyaccel.errors import NotMeasurableError, UsageError
from anyaccel.generation.image_difference import measure_psnr
from anyaccel.processes.json_line_worker import JsonLineWorker

__all__ = ["liken_files", "run_bench", "run_together"]

Tell = Callable[[str], None]
# Pictures before any is measured: the first compiles, the next are recorded.
_WARM = 3


class _Variant:
    """One variant's process."""

    def __init__(self, name: str, work: BenchCase, folder: Path, warm: int) -> None:
        self.name, self.seconds = name, list[float]()
        self.row: dict[str, Any] = {}
        self.worker = JsonLineWorker("anyaccel.bench.worker")
        self.worker.send({"work": work.to_dict(), "variant": name, "folder": str(folder), "warm": warm})

    def ask(self, word: str) -> dict[str, Any]:
        """Say a word, and wait for the answer."""
        self.worker.send(word)
        return self.hear()

    def hear(self) -> dict[str, Any]:
        """The answer to what was said; one with an `error` where the variant failed, which is kept in its row."""
        try:
            answer: dict[str, Any] = self.worker.receive()
        except EOFError:
            status = self.worker.close()
            answer = describe_death(self.name, status, self.worker.stderr)
        if "error" in answer:
            self.row = answer
        return answer

    @property
    def failed(self) -> bool:
        """Whether it failed, and is asked no more."""
        return "error" in self.row


def run_bench(work: BenchCase, *, rounds: int = 5, on_progress: Tell = lambda words: None) -> dict[str, Any]:
    """One row of a table: each variant's median, spread, peak and first picture, and the ratios of their times.

    An error where one of them fails; `run_together` measures the others.
    """
    [row] = run_together([work], rounds=rounds, concurrent_warmup=False, on_progress=on_progress)
    for one in (row, *row.get("variants", {}).values()):
        if "error" in one:
            raise NotMeasurableError(one["error"], hint=one["hint"])
    return row


def run_together(
    works: Sequence[BenchCase],
    *,
    rounds: int = 5,
    concurrent_warmup: bool = True,
    on_progress: Tell = lambda words: None,
) -> Iterator[dict[str, Any]]:
    """Rows for several works: all warm up at once, or undisturbed by each other, and are measured one after another.

    A variant that fails has its `error`, `hint` and `details`; where all of them do, so has the row.
    """
    unknown = [name for work in works for name in work.variants if name not in VARIANTS]
    if unknown or rounds < 1 or not all(work.variants for work in works):
        raise UsageError(f"there is no variant {unknown} or no round to run", hint=f"variants: {', '.join(VARIANTS)}")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="anyaccel-bench-")))
        started: list[tuple[BenchCase, list[_Variant], Path]] = []
        for number, work in enumerate(works):
            own = folder / str(number)
            own.mkdir()
            made = []
            for name in work.variants:
                variant = _Variant(name, work, own, _WARM)
                stack.callback(variant.worker.kill)
                variant.worker.send("warm")
                made.append(variant)
                if not concurrent_warmup:
                    _hear(variant, work, on_progress)
            started.append((work, made, own))
        if concurrent_warmup:
            for work, made, _ in started:
                for variant in made:
                    _hear(variant, work, on_progress)
        for work, made, own in started:
            yield _measure(work, made, own, rounds, on_progress)
            for variant in made:
                variant.worker.kill()


def _hear(variant: _Variant, work: BenchCase, on_progress: Tell) -> None:
    on_progress(f"{work.title or work.model}: {variant.name}, first pictures")
    variant.row |= variant.hear()


def _measure(work: BenchCase, variants: list[_Variant], folder: Path, rounds: int, on_progress: Tell) -> dict[str, Any]:
    head = {"title": work.title or work.model, "model": work.model, "call": work.call, "dtype": work.dtype,
            "random_weights": work.random, "rounds": rounds, "floor_s": work.floor_s}  # fmt: skip
    reference = next((variant.name for variant in variants if not variant.failed), "")
    for turn in range(rounds):
        going = [variant for variant in variants if not variant.failed]
        if going:
            on_progress(f"{head['title']}: round {turn + 1} of {rounds}")
        first = turn % max(1, len(going))
        for variant in going[first:] + going[:first]:
            answer = variant.ask("go")
            if not variant.failed:
                variant.seconds.append(answer["seconds"])
    rows = {variant.name: _summarize(variant, folder, reference) for variant in variants}
    if all(variant.failed for variant in variants):
        told = rows.get(OURS) or next(iter(rows.values()))
        return head | {"error": told["error"], "hint": told["hint"], "failed": rows}
    return head | {"reference": reference, "variants": rows} | _compare(rows, folder)


def _compare(rows: dict[str, Any], folder: Path) -> dict[str, Any]:
    """How many times as fast ours is as each stock one, and fast as exact."""
    ours, fast = (rows.get(name, {}).get("median_s") for name in (OURS, FAST))
    stock = {name: rows.get(name, {}).get("median_s") for name in STOCK}
    found: dict[str, Any] = {f"against {name}": round(took / ours, 3) for name, took in stock.items() if ours and took}
    if ours and fast:
        found |= {"fast against exact": round(ours / fast, 3), **_liken(folder, FAST, OURS, "fast_")}
    return found


def _summarize(variant: _Variant, folder: Path, reference: str) -> dict[str, Any]:
    told = {} if variant.failed else variant.ask("finish")
    if variant.failed:
        return variant.row
    ordered = sorted(variant.seconds)
    row = {
        "median_s": round(statistics.median(ordered), 5),
        "spread_s": [round(ordered[0], 5), round(ordered[-1], 5)],
        **variant.row,
        **told,
    }
    return row | (_liken(folder, variant.name, reference) if variant.name != reference else {})


def _liken(folder: Path, name: str, reference: str, prefix: str = "") -> dict[str, Any]:
    """How like two variants' pictures are, or why nobody can tell."""
    try:
        return {f"{prefix}psnr_db": liken_files(folder / f"{name}.npy", folder / f"{reference}.npy")}
    except NotMeasurableError as error:
        return {f"{prefix}not_compared": error.message}


def liken_files(one: Path, other: Path) -> float | None:
    """How like a picture is to a reference, in decibels; None where they are the same.

    An error where one of them is not finite: then there is no likeness.
    """
    import numpy

    left, right = (numpy.load(path) for path in (one, other))
    broken = [path.stem for path, made in ((one, left), (other, right)) if not numpy.isfinite(made).all()]
    if broken:
        said = " and ".join(f"{name}'s picture" for name in broken)
        raise NotMeasurableError(
            f"{said} {'are' if len(broken) > 1 else 'is'} not finite", hint="a wider dtype may help: float32"
        )
    if left.shape != right.shape:
        return 0.0
    found = measure_psnr(left, right)
    return None if found is None else round(found, 2)
