"""Stock diffusers and anyaccel side by side: the same picture in turns, and the ratio of their times."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from anyaccel.bench.work import FAST, OURS, STOCK, VARIANTS, Work
from anyaccel.errors import NotMeasurableError, UsageError

__all__ = ["run_bench", "run_together"]

Tell = Callable[[str], None]
_WARM = 3
"""Pictures before any is measured: the first compiles, the next are recorded."""


class _Variant:
    """One variant's process."""

    def __init__(self, name: str, work: Work, folder: Path, warm: int) -> None:
        self.name, self.seconds = name, list[float]()
        self.log = (folder / f"{name}.log").open("w+")
        self.row: dict[str, Any] = {}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "anyaccel.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        self._say(json.dumps({"work": work.to_dict(), "variant": name, "folder": str(folder), "warm": warm}))

    def ask(self, word: str) -> dict[str, Any]:
        """Say a word, and wait for the answer."""
        self._say(word)
        return self.hear()

    def hear(self) -> dict[str, Any]:
        """The answer to what was said; an error with the process's last words where it died."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            words = [one for one in self.log.read().splitlines() if one.strip()]
            raise NotMeasurableError(
                f"{self.name} failed: {words[-1] if words else 'it said nothing'}", hint="\n".join(words[-12:])
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def begin(self) -> None:
        """Say that it is to warm up, and do not wait."""
        self._say("warm")

    def _say(self, line: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            self.hear()

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        for file in (self.process.stdin, self.process.stdout, self.log):
            if file is not None:
                with contextlib.suppress(BrokenPipeError):
                    file.close()


def run_bench(work: Work, *, rounds: int = 5, tell: Tell = lambda words: None) -> dict[str, Any]:
    """One row of a table: each variant's median, spread, peak and first picture, and the ratios of their times."""
    [row] = run_together([work], rounds=rounds, at_once=False, tell=tell)
    if "error" in row:
        raise NotMeasurableError(row["error"], hint=row["hint"])
    return row


def run_together(
    works: Sequence[Work], *, rounds: int = 5, at_once: bool = True, tell: Tell = lambda words: None
) -> Iterator[dict[str, Any]]:
    """Rows for several works: all warm up at once, or undisturbed by each other, and are measured one after another."""
    unknown = [name for work in works for name in work.variants if name not in VARIANTS]
    if unknown or rounds < 1:
        raise UsageError(f"there is no variant {unknown} or no round to run", hint=f"variants: {', '.join(VARIANTS)}")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="anyaccel-bench-")))
        started: list[tuple[Work, list[_Variant], Path]] = []
        for number, work in enumerate(works):
            own = folder / str(number)
            own.mkdir()
            made = []
            for name in work.variants:
                variant = _Variant(name, work, own, _WARM)
                stack.callback(variant.close)
                variant.begin()
                made.append(variant)
                if not at_once:
                    _hear(variant, work, tell)
            started.append((work, made, own))
        if at_once:
            for work, made, _ in started:
                for variant in made:
                    _hear(variant, work, tell)
        for work, made, own in started:
            yield _measure(work, made, own, rounds, tell)
            for variant in made:
                variant.close()


def _hear(variant: _Variant, work: Work, tell: Tell) -> None:
    tell(f"{work.title or work.model}: {variant.name}, first pictures")
    try:
        variant.row |= variant.hear()
    except NotMeasurableError as error:
        variant.row |= {"error": error.message, "hint": error.hint}


def _measure(work: Work, variants: list[_Variant], folder: Path, rounds: int, tell: Tell) -> dict[str, Any]:
    head = {"title": work.title or work.model, "model": work.model, "call": work.call, "dtype": work.dtype,
            "random_weights": work.random, "rounds": rounds, "floor_s": work.floor_s}  # fmt: skip
    broken = [variant for variant in variants if "error" in variant.row]
    if broken and broken[0].name != FAST:
        return head | {"error": broken[0].row["error"], "hint": broken[0].row["hint"]}
    going = [variant for variant in variants if variant not in broken]
    for turn in range(rounds):
        tell(f"{head['title']}: round {turn + 1} of {rounds}")
        first = turn % len(going)
        for variant in going[first:] + going[:first]:
            variant.seconds.append(variant.ask("go")["seconds"])
    rows = {variant.name: _summarize(variant, folder, going[0].name) for variant in going}
    rows |= {variant.name: variant.row for variant in broken}
    return head | {"variants": rows} | _compare(rows, folder)


def _compare(rows: dict[str, Any], folder: Path) -> dict[str, Any]:
    """How many times as fast ours is as each stock one, and fast as exact."""
    ours, fast = (rows.get(name, {}).get("median_s") for name in (OURS, FAST))
    found = {f"against {name}": round(rows[name]["median_s"] / ours, 3) for name in STOCK if ours and name in rows}
    if ours and fast:
        psnr = measure_psnr(folder / f"{FAST}.npy", folder / f"{OURS}.npy")
        found |= {"fast against exact": round(ours / fast, 3), "fast_psnr_db": psnr}
    return found


def _summarize(variant: _Variant, folder: Path, reference: str) -> dict[str, Any]:
    ordered = sorted(variant.seconds)
    row = {
        "median_s": round(statistics.median(ordered), 5),
        "spread_s": [round(ordered[0], 5), round(ordered[-1], 5)],
        **variant.row,
        **variant.ask("finish"),
    }
    if variant.name != reference:
        row["psnr_db"] = measure_psnr(folder / f"{variant.name}.npy", folder / f"{reference}.npy")
    return row


def measure_psnr(one: Path, other: Path) -> float | None:
    """How like two pictures are, in decibels; None where they are the same."""
    import numpy

    left, right = numpy.load(one), numpy.load(other)
    if left.shape != right.shape or not numpy.isfinite(left).all():
        return 0.0
    error = float(((left - right) ** 2).mean())
    return round(10 * math.log10(1 / error), 2) if error > 0 else None
