"""Random arrivals: step batching compared to one request at a time and to batches of whole requests.

    python -m benchmarks.serving cuda --json benchmarks/results/serving_cuda.json
    python -m benchmarks.serving cuda --loads 0.8 --seconds 90
    python -m benchmarks.serving cpu --tiny --seconds 5

The model has the shape of Stable Diffusion 1.5 with random weights, 512 x 512, guidance and no text encoder. One graph
per batch size is compiled once and used by all modes; images are decoded one by one. The capacity of each mode is
measured with a queue that is never empty. Then requests arrive as a Poisson process at 50, 80 and 95 % of the capacity
of whole-request batches. Batches have up to 16 requests; whole requests are also measured with up to 8 at 80 %, since
they wait less for smaller batches. Latency is the time from arrival to the image in host memory. Each row is written
immediately. The batch sizes are compiled by concurrent processes first, which takes one to two minutes each.
"""

import argparse
import gc
import json
import queue
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anyaccel.bench.case import OURS, BenchCase
from anyaccel.bench.pipelines import make_call, make_pipeline
from anyaccel.server.batching.batched_forward import BatchStats
from anyaccel.server.batching.shared_pipeline import SharedPipeline
from anyaccel.server.settings import compute_max_in_flight
from benchmarks.provenance import describe_run, read_commit
from benchmarks.speed import CASES

LOADS = (0.5, 0.8, 0.95)
COMPARED = 0.8
STEPS, MAX_BATCH, SMALL_BATCH = 30, 16, 8
ALONE, SMALLER = "one at a time", f"whole requests, {SMALL_BATCH} at once"
TINY = {"block_out_channels": (32, 64, 64, 64), "cross_attention_dim": 64, "attention_head_dim": 8}

_MIN_BATCHES = 4
"""Minimum number of batches for a measurement of capacity."""

Submit = Callable[[int], "Future[float]"]
"""Submits a request with a seed; the future returns the time at which the image is in host memory."""


def make_job_spec(device: str, *, tiny: bool) -> BenchCase:
    """Return the model and its call."""
    placement_options: dict[str, Any] = {"check_finite": False, "compile": not tiny, "expected_images": 10_000}
    case = replace(
        CASES["sd15"],
        device=device,
        dtype="float32" if tiny else "bfloat16",
        random=True,
        options=placement_options,
    )
    call = {**case.call, "num_inference_steps": STEPS, "output_type": "np"}
    if tiny:
        embeds: dict[str, tuple[int, ...]] = dict.fromkeys(case.embeds, (1, 77, 64))
        call |= {"height": 32, "width": 32, "num_inference_steps": 4}
        return replace(case, config={"unet": TINY}, embeds=embeds, call=call)
    return replace(case, call=call)


def completion_time(output: Any) -> float:
    """Return the current time; the pipeline has already copied the image to host memory."""
    assert isinstance(output.images, np.ndarray)
    return time.perf_counter()


@contextmanager
def one_at_a_time(shared: SharedPipeline, call: dict[str, Any]) -> Iterator[Submit]:
    """Run requests one at a time, in the order of their arrival."""
    with without_step_sync(shared), ThreadPoolExecutor(1) as thread:
        yield lambda seed: thread.submit(lambda: completion_time(shared.run({**call, "seed": seed})))


@contextmanager
def whole_requests(shared: SharedPipeline, call: dict[str, Any], max_batch: int = MAX_BATCH) -> Iterator[Submit]:
    """Run all waiting requests as one batch, padded to a compiled size, when the device is free."""
    waiting: queue.SimpleQueue[tuple[int, Future[float]] | None] = queue.SimpleQueue()
    stopping = threading.Event()

    def run() -> None:
        while not stopping.is_set():
            first = waiting.get()
            if first is None:
                return
            batch = [first]
            while len(batch) < max_batch and not waiting.empty():
                item = waiting.get()
                if item is None:
                    stopping.set()
                    break
                batch.append(item)
            done = completion_time(shared.run(join_calls(call, [seed for seed, _ in batch])))
            for _, future in batch:
                future.set_result(done)

    def submit(seed: int) -> "Future[float]":
        future: Future[float] = Future()
        waiting.put((seed, future))
        return future

    thread = threading.Thread(target=run)
    thread.start()
    try:
        with without_step_sync(shared):
            yield submit
            waiting.put(None)
            thread.join()
    finally:
        waiting.put(None)
        thread.join()


@contextmanager
def step_batching(shared: SharedPipeline, call: dict[str, Any]) -> Iterator[Submit]:
    """Run each request as its own call; the calls are batched at every step."""
    stats = shared.forwards["unet"].stats = BatchStats()
    with ThreadPoolExecutor(compute_max_in_flight(MAX_BATCH)) as threads:
        yield lambda seed: threads.submit(lambda: completion_time(shared.run({**call, "seed": seed})))
    print(json.dumps({"rounds": stats.sizes}), file=sys.stderr)


@contextmanager
def without_step_sync(shared: SharedPipeline) -> Iterator[None]:
    """Disable synchronization at each step inside the block, because only one call runs and no other can join it."""
    mark, shared.batcher.mark = shared.batcher.mark, None
    try:
        yield
    finally:
        shared.batcher.mark = mark


MODES: dict[str, Callable[[SharedPipeline, dict[str, Any]], AbstractContextManager[Submit]]] = {
    ALONE: one_at_a_time,
    "whole requests": whole_requests,
    SMALLER: partial(whole_requests, max_batch=SMALL_BATCH),
    "steps": step_batching,
}


def list_sizes() -> list[int]:
    """Return the batch sizes to compile."""
    sizes = [1]
    while sizes[-1] < MAX_BATCH:
        sizes.append(min(MAX_BATCH, 2 * sizes[-1]))
    return sizes


def join_calls(call: dict[str, Any], seeds: list[int]) -> dict[str, Any]:
    """Return one call for several requests, padded to a compiled size."""
    size = next(size for size in list_sizes() if size >= len(seeds))
    rows = {
        name: value.repeat_interleave(size, 0) if isinstance(value, torch.Tensor) else value
        for name, value in call.items()
    }
    return {**rows, "seed": [*seeds, *[seeds[-1]] * (size - len(seeds))]}


def make_shared(case: BenchCase, sizes: Sequence[int]) -> tuple[SharedPipeline, dict[str, Any]]:
    """Return the pipeline with graphs for these batch sizes; the warm-up before that runs eagerly."""
    dynamo: Any = torch._dynamo.config
    dynamo.automatic_dynamic_shapes = False  # one graph per size, independent of the order
    pipe = make_pipeline(case, OURS)
    pipe.vae.enable_slicing()
    call = make_call(case, pipe)
    short = {**call, "num_inference_steps": 4}
    with torch.no_grad():
        torch.compiler.set_stance("force_eager")
        pipe(**short, seed=0)
        shared = SharedPipeline(pipe, max_calls=MAX_BATCH)
        joins = shared.warm_up({**short, "seed": 0}, {**short, "seed": 1})
        assert joins["unet"], joins
        torch.compiler.set_stance("default")
    shared.enable({name: name == "unet" for name in joins})
    shared.forwards["unet"].prepare_batch_sizes(sizes)
    shared.run({**short, "seed": 0})  # compiles the decoder
    return shared, call


def fill_cache(device: str) -> None:
    """Compile each size in its own process, concurrently."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.serving", device, "--only"]
    running = [subprocess.Popen([*command, str(size)]) for size in list_sizes()]
    failed = [process.args for process in running if process.wait()]
    print(json.dumps({"filled_s": time.perf_counter() - start, "failed": failed}), file=sys.stderr, flush=True)


def time_batch(shared: SharedPipeline, call: dict[str, Any], size: int) -> float:
    """Return the seconds of one call with this many images."""
    start = time.perf_counter()
    return completion_time(shared.run(join_calls(call, list(range(size))))) - start


def measure_capacity(submit: Submit, seconds: float) -> float:
    """Return the requests per second with a full queue: the slope of completions after a quarter of the time.

    A count would ignore unfinished requests at the end, which only some modes have.
    """
    start = time.perf_counter()
    in_flight: list[Future[float]] = [submit(seed) for seed in range(2 * MAX_BATCH)]
    ends: list[float] = []
    while (
        not ends
        or ends[-1] - start < seconds
        or len({end for end in ends if end - start >= seconds / 4}) < _MIN_BATCHES
    ):
        ends.append(in_flight.pop(0).result())
        in_flight.append(submit(len(ends) + len(in_flight)))
    last = ends[-1]
    ends += [future.result() for future in in_flight]
    counted = sorted(end for end in ends if seconds / 4 <= end - start and end <= last)
    return 1 / statistics.linear_regression(range(len(counted)), counted).slope


def measure_load(submit: Submit, rate: float, seconds: float, seed: int) -> dict[str, float]:
    """Return throughput and latencies for Poisson arrivals.

    A Poisson process with a given number of arrivals has independent, uniformly distributed arrival times.
    """
    rng = random.Random(seed)
    arrivals: list[float] = []
    futures: list[Future[float]] = []
    start = time.perf_counter()
    for due in sorted(start + rng.uniform(0, seconds) for _ in range(round(rate * seconds))):
        time.sleep(max(0.0, due - time.perf_counter()))
        arrivals.append(due)
        futures.append(submit(len(arrivals)))
    ends = [future.result() for future in futures]
    latencies = sorted(end - arrival for end, arrival in zip(ends, arrivals, strict=True))
    cuts = statistics.quantiles(latencies, n=100, method="inclusive")
    return {
        "requests": len(latencies),
        "per_s": len(latencies) / (max(ends) - start),
        "p50_s": cuts[49],
        "p95_s": cuts[94],
        "mean_s": statistics.mean(latencies),
    }


def measure_modes(
    shared: SharedPipeline,
    call: dict[str, Any],
    capacity: dict[str, float],
    load: float,
    seconds: float,
    write_row: Callable[[dict[str, Any]], None],
) -> None:
    """Measure all modes at one load, with the same requests at the same times."""
    rate = load * capacity["whole requests"]
    for name, mode in MODES.items():
        row = {"way": name, "load": load, "asked_per_s": rate}
        if name == SMALLER and load != COMPARED:
            continue
        if name == ALONE and rate > capacity[name]:
            write_row({**row, "skipped": "its queue would grow without limit"})
            continue
        with mode(shared, call) as submit:
            result = measure_load(submit, rate, seconds, seed=round(100 * load))
        write_row({**row, **result})


def main() -> None:
    """Measure all modes and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument(
        "--loads", type=float, nargs="*", default=LOADS, help="Fractions of the capacity of whole requests."
    )
    parser.add_argument("--tiny", action="store_true", help="Use a small model, to test this script.")
    parser.add_argument("--only", type=int, help="Compile one batch size and exit.")
    parser.add_argument("--commit")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    case = make_job_spec(options.device, tiny=options.tiny)
    if options.only:
        make_shared(case, [options.only])
        return
    if not options.tiny:
        fill_cache(options.device)
    shared, call = make_shared(case, list_sizes())
    gc.freeze()  # as the worker of the service does
    result: dict[str, Any] = {
        **describe_run(options.commit or read_commit()),
        "device": options.device,
        "work": f"{'tiny model' if options.tiny else case.model}, {case.dtype}, {case.call}",
        "rows": [],
    }

    def write_row(row: dict[str, Any]) -> None:
        result["rows"].append(row)
        print(json.dumps(row), flush=True)
        if options.json:
            options.json.write_text(json.dumps(result, indent=1) + "\n")

    for size in list_sizes():
        with without_step_sync(shared):
            seconds = [time_batch(shared, call, size) for _ in range(4)]
        write_row({"pictures_at_once": size, "median_s": statistics.median(seconds[1:])})
    capacity: dict[str, float] = {}
    for name, mode in MODES.items():
        with mode(shared, call) as submit:
            capacity[name] = measure_capacity(submit, options.seconds / 2)
        write_row({"way": name, "load": "full", "per_s": capacity[name]})
    for load in options.loads:
        measure_modes(shared, call, capacity, load, options.seconds, write_row)


if __name__ == "__main__":
    main()
