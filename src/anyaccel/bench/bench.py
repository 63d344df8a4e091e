"""Benchmark runner for stock diffusers and anyaccel.

The variants take turns generating the same image, each in its own process.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from anyaccel.bench.case import FAST, OFFLOADED, OURS, STOCK, VARIANTS, BenchCase
from anyaccel.bench.failure_rows import make_exit_row, make_timeout_row
from anyaccel.errors import NotMeasurableError, UsageError, nearest
from anyaccel.generation.image_difference import measure_psnr
from anyaccel.processes.json_line_worker import JsonLineWorker

__all__ = ["measure_file_psnr", "run_bench", "run_together"]

ProgressCallback = Callable[[str], None]
# Images before the measurement: the first compiles, the next ones capture graphs.
_WARMUP_IMAGES = 3
# Offloaded weights are neither compiled nor captured, and each image takes long.
_OFFLOADED_WARMUP_IMAGES, _OFFLOADED_ROUNDS = 1, 1


class _Variant:
    """A benchmark variant, such as `stock eager` or `anyaccel`, with its worker process and results."""

    def __init__(self, name: str, case: BenchCase, folder: Path, timeout_s: float) -> None:
        self.name, self.seconds = name, list[float]()
        self.timeout_s, self._sent_at = timeout_s, time.monotonic()
        self.row: dict[str, Any] = {}
        # One process per variant: compiled models in one process slow each other down, because all guards are checked.
        self.worker = JsonLineWorker("anyaccel.bench.worker")
        warm = _OFFLOADED_WARMUP_IMAGES if name == OFFLOADED else _WARMUP_IMAGES
        self.worker.send({"case": case.to_dict(), "variant": name, "folder": str(folder), "warm": warm})

    def request(self, command: str) -> dict[str, Any]:
        """Send a command to the worker process and return its response."""
        self._sent_at = time.monotonic()
        self.worker.send(command)
        return self.receive()

    def receive(self) -> dict[str, Any]:
        """Return the worker's next response; if it contains an `error`, store it as the variant's result.

        A worker that has not responded `timeout_s` seconds after the command is killed.
        """
        try:
            answer: dict[str, Any] = self.worker.receive(self._count_seconds_left())
        except EOFError:
            status = self.worker.close()
            answer = (
                make_exit_row(self.name, status, self.worker.stderr)
                if self._count_seconds_left()
                else make_timeout_row(self.name, self.timeout_s, self.worker.stderr)
            )
        if "error" in answer:
            self.row = answer
        return answer

    def _count_seconds_left(self) -> float:
        return max(0.0, min(threading.TIMEOUT_MAX, self.timeout_s - (time.monotonic() - self._sent_at)))

    @property
    def failed(self) -> bool:
        """Whether the variant has failed; a failed variant receives no further commands."""
        return "error" in self.row


def run_bench(case: BenchCase, *, rounds: int = 5, on_progress: ProgressCallback = lambda text: None) -> dict[str, Any]:
    """Benchmark one case and return a dict with the results of each variant and the speedups.

    The results are the median time, the shortest and longest time, the peak memory and the time to
    generate the first image. Raises if a variant fails; use `run_together` to measure the remaining
    variants in that case.
    """
    [row] = run_together([case], rounds=rounds, concurrent_warmup=False, on_progress=on_progress)
    for result in (row, *row.get("variants", {}).values()):
        if "error" in result:
            raise NotMeasurableError(result["error"], hint=result["hint"])
    return row


def run_together(
    cases: Sequence[BenchCase],
    *,
    rounds: int = 5,
    concurrent_warmup: bool = True,
    timeout_s: float = float("inf"),
    enough_s: float = float("inf"),
    output_dir: Path | None = None,
    on_progress: ProgressCallback = lambda text: None,
) -> Iterator[dict[str, Any]]:
    """Benchmark several cases and yield one dict with results per case.

    With `concurrent_warmup`, all variants warm up at the same time; the timed calls always run one
    after another. A variant fails if its first images or one timed call take longer than `timeout_s`
    seconds. After `enough_s` seconds of timed calls, a case gets no further rounds. The images are saved
    under `output_dir`, by default in a temporary folder.

    The result of a failed variant contains `error`, `hint` and `details`. If all variants of a case
    fail, the dict for the case also contains `error` and `hint`.
    """
    _check_arguments(cases, rounds)
    with ExitStack() as stack:
        folder = output_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="anyaccel-bench-")))
        started: list[tuple[BenchCase, list[_Variant], Path]] = []
        for number, case in enumerate(cases):
            case_folder = folder / str(number)
            case_folder.mkdir(exist_ok=True)
            variants = []
            for name in case.variants:
                variant = _Variant(name, case, case_folder, timeout_s)
                stack.callback(variant.worker.kill)
                variant.worker.send("warm")
                variants.append(variant)
                # Concurrent warmup saves compile time, but all first images then compete for the cores.
                if not concurrent_warmup:
                    _wait_for_warmup(variant, case, on_progress)
            started.append((case, variants, case_folder))
        if concurrent_warmup:
            waiting = [(variant, case) for case, variants, _ in started for variant in variants]
            # One thread for each: a worker's time limit must not expire while another one is waited for.
            with ThreadPoolExecutor(max_workers=max(1, len(waiting))) as pool:
                for finished in [pool.submit(_wait_for_warmup, *pair, on_progress) for pair in waiting]:
                    finished.result()
        for case, variants, case_folder in started:
            yield _measure(case, variants, case_folder, (rounds, enough_s), on_progress)
            # Frees the device memory for the next case.
            for variant in variants:
                variant.worker.kill()


def _check_arguments(cases: Sequence[BenchCase], rounds: int) -> None:
    unknown = [name for case in cases for name in case.variants if name not in VARIANTS]
    if unknown:
        raise UsageError(f"unknown variant {unknown[0]!r}", hint=nearest(unknown[0], VARIANTS))
    if not all(case.variants for case in cases):
        raise UsageError("a benchmark case has no variants", hint=f"pass at least one of {', '.join(VARIANTS)}")
    if rounds < 1:
        raise UsageError(f"rounds must be at least 1, not {rounds}", hint="for example rounds=5")


def _wait_for_warmup(variant: _Variant, case: BenchCase, on_progress: ProgressCallback) -> None:
    title = f"{case.title or case.model}: {variant.name}"
    on_progress(f"{title}, first images")
    variant.row |= variant.receive()
    on_progress(f"{title}, {'failed' if variant.failed else 'ready'}")


def _measure(
    case: BenchCase, variants: list[_Variant], folder: Path, limits: tuple[int, float], on_progress: ProgressCallback
) -> dict[str, Any]:
    rounds, enough_s = limits
    head = {"title": case.title or case.model, "model": case.model, "call": case.call, "dtype": case.dtype,
            "random_weights": case.random, "rounds": rounds, "floor_s": case.floor_s}  # fmt: skip
    reference = next((variant.name for variant in variants if not variant.failed), "")
    start = time.monotonic()
    for index in range(rounds):
        running = [
            variant
            for variant in variants
            if not variant.failed and (variant.name != OFFLOADED or index < _OFFLOADED_ROUNDS)
        ]
        if index and time.monotonic() - start > enough_s:
            break
        if running:
            on_progress(f"{head['title']}: round {index + 1} of {rounds}")
        # Each round starts with another variant, so that none always runs on a warmer device.
        first = index % max(1, len(running))
        for variant in running[first:] + running[:first]:
            answer = variant.request("go")
            if not variant.failed:
                variant.seconds.append(answer["seconds"])
    rows = {variant.name: _summarize(variant, folder, reference) for variant in variants}
    if all(variant.failed for variant in variants):
        # The error of anyaccel is the one to report; the stock variants are only the comparison.
        failure = rows.get(OURS) or next(iter(rows.values()))
        return head | {"error": failure["error"], "hint": failure["hint"], "failed": rows}
    return head | {"reference": reference, "variants": rows} | _compare(rows, folder)


def _compare(rows: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return anyaccel's speedups over stock diffusers, and the speedup of `fast` over `exact`."""
    ours, fast = (rows.get(name, {}).get("median_s") for name in (OURS, FAST))
    stock = {name: rows.get(name, {}).get("median_s") for name in STOCK}
    speedups: dict[str, Any] = {
        f"against {name}": round(median / ours, 3) for name, median in stock.items() if ours and median
    }
    if ours and fast:
        speedups |= {"fast against exact": round(ours / fast, 3), **_measure_psnr(folder, FAST, OURS, "fast_")}
    return speedups


def _summarize(variant: _Variant, folder: Path, reference: str) -> dict[str, Any]:
    details = {} if variant.failed else variant.request("finish")
    if variant.failed:
        return variant.row
    ordered = sorted(variant.seconds)
    row = {
        "median_s": round(statistics.median(ordered), 5),
        "timed_images": len(ordered),
        "spread_s": [round(ordered[0], 5), round(ordered[-1], 5)],
        **variant.row,
        **details,
    }
    return row | (_measure_psnr(folder, variant.name, reference) if variant.name != reference else {})


def _measure_psnr(folder: Path, name: str, reference: str, prefix: str = "") -> dict[str, Any]:
    """Return the PSNR between the images of two variants, or the reason why they cannot be compared."""
    try:
        return {f"{prefix}psnr_db": measure_file_psnr(folder / f"{name}.npy", folder / f"{reference}.npy")}
    except NotMeasurableError as error:
        return {f"{prefix}not_compared": error.message}


def measure_file_psnr(path: Path, reference: Path) -> float | None:
    """Return the PSNR of an image in decibels, or None if the image equals the reference.

    Raises if either image contains NaN or Inf.
    """
    import numpy

    image, expected = numpy.load(path), numpy.load(reference)
    pairs = ((path, image), (reference, expected))
    not_finite = [file.stem for file, values in pairs if not numpy.isfinite(values).all()]
    if not_finite:
        subject, verb = ("images", "contain") if len(not_finite) > 1 else ("image", "contains")
        raise NotMeasurableError(
            f"the {subject} from {' and '.join(not_finite)} {verb} NaN or Inf", hint="use --dtype float32"
        )
    if image.shape != expected.shape:
        return 0.0
    psnr = measure_psnr(image, expected)
    return None if psnr is None else round(psnr, 2)
