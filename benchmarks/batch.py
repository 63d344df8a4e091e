"""Overhead of `anyaccel batch` compared to a plain loop, and the speedup with a second worker.

    python -m benchmarks.batch

Writes benchmarks/results/batch_cpu.json. Three modes run in turn, each in its own process: a loop that generates and
writes images on one core, `anyaccel batch` with one worker on that core, and with two workers on two cores. Rates do
not include loading the model. Ratios compare the medians of one run.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from anyaccel.progress import ProgressListener
from benchmarks.provenance import describe_run, read_commit
from tests.cluster.batch.batch_kills import write_rows

RESULT = Path(__file__).parent / "results" / "batch_cpu.json"
STEPS = 8


class Clock(ProgressListener):
    """Listener that starts timing when all workers are ready."""

    def __init__(self, workers: int) -> None:
        self.not_ready = workers
        self.start = self.end = 0.0
        self.finished_before = self.finished = 0

    def on_phase(self, text: str) -> None:
        """Start the clock when the last worker is ready for rows."""
        self.not_ready -= text == "rows"
        if not self.not_ready and not self.start:
            self.start, self.finished_before = time.perf_counter(), self.finished

    def on_row(self, done: int, total: int, text: str) -> None:
        """Count a row."""
        self.finished, self.end = done, time.perf_counter()

    def on_warning(self, text: str) -> None:
        """Raise, because no row and no worker may fail."""
        raise AssertionError(text)


def time_batch(rows: Path, out: Path, workers: int) -> float:
    """Return the images per second of `anyaccel batch`."""
    from anyaccel.cluster.batch.image_worker import WorkerSettings
    from anyaccel.cluster.batch.start import BatchJob, run_batch

    clock = Clock(workers)
    settings = WorkerSettings(device="cpu", dtype="float32", threads=1)
    run_batch(BatchJob(source=str(rows), out=out, settings=settings, workers=workers), clock)
    return (clock.finished - clock.finished_before) / (clock.end - clock.start)


def time_loop(rows: Path, out: Path) -> float:
    """Return the images per second of a loop over the same rows that writes the same files."""
    import torch

    from anyaccel.cluster.batch.rows import read_rows
    from anyaccel.generation.image_format import encode_image
    from anyaccel.generation.media import generate_one
    from anyaccel.generation.model_loading import load_uncached
    from anyaccel.generation.output_files import write_output_file
    from anyaccel.generation.request import make_request
    from anyaccel.planning.options import PlacementOptions

    torch.set_num_threads(1)
    request = make_request("", None, "cpu", 0, dtype="float32")
    loaded = load_uncached(request, PlacementOptions(dtype="float32"))
    loaded.pipe.set_progress_bar_config(disable=True)
    out.mkdir()
    parsed, _ = read_rows(str(rows))
    start = time.perf_counter()
    for row in parsed:
        image = generate_one(loaded, row.prompt, row.seed, {**request.call, **row.call})
        write_output_file(out / f"{row.number}.png", encode_image(image.image, ".png", [image.metadata]))
    return len(parsed) / (time.perf_counter() - start)


def run_process(mode: str, rows: Path, out: Path, core: int | None) -> float:
    """Run one mode in its own process; return its images per second."""
    command = [sys.executable, "-m", "benchmarks.batch", "--way", mode, "--input", str(rows), "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    pin = None if core is None else lambda: os.sched_setaffinity(0, {core})
    done = subprocess.run(command, env=environment, preexec_fn=pin, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure all modes in turn and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", choices=("loop", "one", "two"))
    parser.add_argument("--input", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.way == "loop":
        print(time_loop(options.input, options.out))
        return
    if options.way:
        print(time_batch(options.input, options.out, 1 if options.way == "one" else 2))
        return
    rates: dict[str, list[float]] = {"loop": [], "one": [], "two": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for index in range(options.rounds):
            for mode, values in rates.items():
                count = options.rows * (
                    3 if mode == "two" else 1
                )  # the second worker is ready some rows after the first
                rows = write_rows(folder / f"{mode}.jsonl", count, STEPS)
                values.append(run_process(mode, rows, folder / f"{mode}-{index}", None if mode == "two" else 0))
                print(f"{mode}: {values[-1]:.3f} images per second", file=sys.stderr)
    median = {mode: statistics.median(values) for mode, values in rates.items()}
    result = {
        **describe_run(read_commit()),
        "evidence": "cpu",
        "rows": options.rows,
        "steps": STEPS,
        "pictures_a_second": rates,
        "one_worker_of_the_loop": median["one"] / median["loop"],
        "two_workers_of_one": median["two"] / median["one"],
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
