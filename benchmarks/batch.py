"""What a batch costs beside a plain loop, and what a second worker brings.

    python -m benchmarks.batch

Writes benchmarks/results/batch_cpu.json. In turns, each in a process of its own: a loop that makes pictures and writes
them, pinned to one core; `anyaccel batch` with one worker on that core; with two workers on two cores. Rates are of
pictures after the model is there, and ratios are of medians in one run.
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
    """Remembers when all workers were ready, and how many rows were done then."""

    def __init__(self, workers: int) -> None:
        self.awaited = workers
        self.began = self.ended = 0.0
        self.before = self.over = 0

    def on_phase(self, text: str) -> None:
        """Start the clock when the last worker is ready for rows."""
        self.awaited -= text == "rows"
        if not self.awaited and not self.began:
            self.began, self.before = time.perf_counter(), self.over

    def on_row(self, done: int, total: int, text: str) -> None:
        """Count a row."""
        self.over, self.ended = done, time.perf_counter()

    def on_warning(self, text: str) -> None:
        """Fail: no row and no worker may fail."""
        raise AssertionError(text)


def time_batch(rows: Path, out: Path, workers: int) -> float:
    """Pictures a second by `anyaccel batch`."""
    from anyaccel.cluster.batch.image_worker import WorkerSettings
    from anyaccel.cluster.batch.start import BatchJob, run_batch

    clock = Clock(workers)
    settings = WorkerSettings(device="cpu", dtype="float32", threads=1)
    run_batch(BatchJob(source=str(rows), out=out, settings=settings, workers=workers), clock)
    return (clock.over - clock.before) / (clock.ended - clock.began)


def time_loop(rows: Path, out: Path) -> float:
    """Pictures a second by a loop over the same rows that writes the same files."""
    import torch

    from anyaccel.cluster.batch.rows import read_rows
    from anyaccel.generation.image import generate_image
    from anyaccel.generation.image_format import encode_image
    from anyaccel.generation.model_cache import load_uncached
    from anyaccel.generation.output_files import write_output_file
    from anyaccel.generation.request import make_request
    from anyaccel.planning.options import PlacementOptions

    torch.set_num_threads(1)
    order = make_request("", None, "cpu", 0, dtype="float32")
    loaded = load_uncached(order, PlacementOptions(dtype="float32"))
    loaded.pipe.set_progress_bar_config(disable=True)
    out.mkdir()
    asked, _ = read_rows(str(rows))
    began = time.perf_counter()
    for row in asked:
        made = generate_image(loaded, row.prompt, row.seed, {**order.call, **row.call})
        write_output_file(out / f"{row.number}.png", encode_image(made.image, ".png", [made.metadata]))
    return len(asked) / (time.perf_counter() - began)


def run_apart(way: str, rows: Path, out: Path, core: int | None) -> float:
    """One of the three in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.batch", "--way", way, "--input", str(rows), "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    pin = None if core is None else lambda: os.sched_setaffinity(0, {core})
    done = subprocess.run(command, env=environment, preexec_fn=pin, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure in turns."""
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
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for turn in range(options.rounds):
            for way, found in rates.items():
                count = options.rows * (3 if way == "two" else 1)  # the second worker comes when the first has begun
                rows = write_rows(place / f"{way}.jsonl", count, STEPS)
                found.append(run_apart(way, rows, place / f"{way}-{turn}", None if way == "two" else 0))
                print(f"{way}: {found[-1]:.3f} pictures a second", file=sys.stderr)
    median = {way: statistics.median(found) for way, found in rates.items()}
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
