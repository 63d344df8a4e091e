"""Requests that come at random: step batching beside one request at a time and batches of whole requests.

    python -m benchmarks.serving cuda --json benchmarks/results/serving_cuda.json
    python -m benchmarks.serving cuda --loads 0.8 --seconds 90
    python -m benchmarks.serving cpu --tiny --seconds 5

A model of Stable Diffusion 1.5's shape with random weights, 512 x 512, guidance, without the text encoder. Its graphs,
one for each size of batch, are compiled once, and all ways use them in turn; pictures are decoded one by one. What a
device can do is measured with a queue that never empties; then requests come by Poisson's law at 50, 80 and 95 % of
what batches of whole requests can do. Batches are of up to 16; since whole requests wait less for smaller ones, they
are measured with up to 8 as well, at 80 %. Latency is from a request's coming to its picture on the host. Each row is
written as soon as it is there. Sizes are compiled by processes side by side first: each takes a minute or two.
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
from anyaccel.server.batching.shared_pipeline import SharedPipeline
from anyaccel.server.batching.step_batcher import BatchStats
from anyaccel.server.settings import compute_max_in_flight
from benchmarks.provenance import describe_run, read_commit
from benchmarks.speed import CASES

LOADS = (0.5, 0.8, 0.95)
COMPARED = 0.8
STEPS, MOST, FEWER = 30, 16, 8
ALONE, SMALLER = "one at a time", f"whole requests, {FEWER} at once"
TINY = {"block_out_channels": (32, 64, 64, 64), "cross_attention_dim": 64, "attention_head_dim": 8}

_FEWEST = 4
"""Batches that a capacity is measured by."""

Submit = Callable[[int], "Future[float]"]
"""Takes a seed; the future is done, with the time, when the picture is on the host."""


def make_job_spec(device: str, *, tiny: bool) -> BenchCase:
    """The model and its call."""
    placement_options: dict[str, Any] = {"check_finite": False, "compile": not tiny, "expected_images": 10_000}
    work = replace(
        CASES["sd15"],
        device=device,
        dtype="float32" if tiny else "bfloat16",
        random=True,
        options=placement_options,
    )
    call = {**work.call, "num_inference_steps": STEPS, "output_type": "np"}
    if tiny:
        embeds: dict[str, tuple[int, ...]] = dict.fromkeys(work.embeds, (1, 77, 64))
        call |= {"height": 32, "width": 32, "num_inference_steps": 4}
        return replace(work, config=TINY, embeds=embeds, call=call)
    return replace(work, call=call)


def fetch(made: Any) -> float:
    """When the picture was on the host, where the pipeline itself took it."""
    assert isinstance(made.images, np.ndarray)
    return time.perf_counter()


@contextmanager
def one_at_a_time(shared: SharedPipeline, call: dict[str, Any]) -> Iterator[Submit]:
    """Requests in the order of their coming."""
    with running_ahead(shared), ThreadPoolExecutor(1) as thread:
        yield lambda seed: thread.submit(lambda: fetch(shared.run({**call, "seed": seed})))


@contextmanager
def whole_requests(shared: SharedPipeline, call: dict[str, Any], most: int = MOST) -> Iterator[Submit]:
    """Whatever waits when the device is free goes as one batch, filled up to a size that is ready."""
    waiting: queue.SimpleQueue[tuple[int, Future[float]] | None] = queue.SimpleQueue()
    ending = threading.Event()

    def run() -> None:
        while not ending.is_set():
            first = waiting.get()
            if first is None:
                return
            batch = [first]
            while len(batch) < most and not waiting.empty():
                more = waiting.get()
                if more is None:
                    ending.set()
                    break
                batch.append(more)
            done = fetch(shared.run(join_calls(call, [seed for seed, _ in batch])))
            for _, future in batch:
                future.set_result(done)

    def submit(seed: int) -> "Future[float]":
        future: Future[float] = Future()
        waiting.put((seed, future))
        return future

    thread = threading.Thread(target=run)
    thread.start()
    try:
        with running_ahead(shared):
            yield submit
            waiting.put(None)
            thread.join()
    finally:
        waiting.put(None)
        thread.join()


@contextmanager
def steps_of_all(shared: SharedPipeline, call: dict[str, Any]) -> Iterator[Submit]:
    """Each request a call of its own, which meets the others at every step."""
    stats = shared.forwards["unet"].stats = BatchStats()
    with ThreadPoolExecutor(compute_max_in_flight(MOST)) as threads:
        yield lambda seed: threads.submit(lambda: fetch(shared.run({**call, "seed": seed})))
    print(json.dumps({"rounds": stats.sizes}), file=sys.stderr)


@contextmanager
def running_ahead(shared: SharedPipeline) -> Iterator[None]:
    """While the block runs nobody waits for the device at each step: there is one call at a time, and none to join."""
    mark, shared.batcher.mark = shared.batcher.mark, None
    try:
        yield
    finally:
        shared.batcher.mark = mark


WAYS: dict[str, Callable[[SharedPipeline, dict[str, Any]], AbstractContextManager[Submit]]] = {
    ALONE: one_at_a_time,
    "whole requests": whole_requests,
    SMALLER: partial(whole_requests, most=FEWER),
    "steps": steps_of_all,
}


def list_sizes() -> list[int]:
    """The sizes of batch that are made ready."""
    sizes = [1]
    while sizes[-1] < MOST:
        sizes.append(min(MOST, 2 * sizes[-1]))
    return sizes


def join_calls(call: dict[str, Any], seeds: list[int]) -> dict[str, Any]:
    """One call for several requests, filled up to a size that is ready."""
    size = next(size for size in list_sizes() if size >= len(seeds))
    rows = {
        name: value.repeat_interleave(size, 0) if isinstance(value, torch.Tensor) else value
        for name, value in call.items()
    }
    return {**rows, "seed": [*seeds, *[seeds[-1]] * (size - len(seeds))]}


def make_shared(work: BenchCase, sizes: Sequence[int]) -> tuple[SharedPipeline, dict[str, Any]]:
    """The pipeline with graphs for these sizes of batch; what is found out before they are there runs without."""
    dynamo: Any = torch._dynamo.config
    dynamo.automatic_dynamic_shapes = False  # each size has a graph of its own, whichever was there before
    pipe = make_pipeline(work, OURS)
    pipe.vae.enable_slicing()
    call = make_call(work, pipe)
    short = {**call, "num_inference_steps": 4}
    with torch.no_grad():
        torch.compiler.set_stance("force_eager")
        pipe(**short, seed=0)
        shared = SharedPipeline(pipe, max_calls=MOST)
        joins = shared.warm_up({**short, "seed": 0}, {**short, "seed": 1})
        assert joins["unet"], joins
        torch.compiler.set_stance("default")
    shared.enable({name: name == "unet" for name in joins})
    shared.forwards["unet"].prepare_batch_sizes(sizes)
    shared.run({**short, "seed": 0})  # the decoder's graph
    return shared, call


def fill_cache(device: str) -> None:
    """Compile each size in a process of its own, side by side."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.serving", device, "--only"]
    running = [subprocess.Popen([*command, str(size)]) for size in list_sizes()]
    failed = [one.args for one in running if one.wait()]
    print(json.dumps({"filled_s": time.perf_counter() - start, "failed": failed}), file=sys.stderr, flush=True)


def time_batch(shared: SharedPipeline, call: dict[str, Any], size: int) -> float:
    """What so many pictures take as one call."""
    start = time.perf_counter()
    return fetch(shared.run(join_calls(call, list(range(size))))) - start


def measure_capacity(submit: Submit, seconds: float) -> float:
    """Requests a second where there is always one more: the line through all pictures after a quarter of the time.

    Not a count: it would leave out what is under way at the end, and of that whole batches have nothing.
    """
    start = time.perf_counter()
    under_way: list[Future[float]] = [submit(seed) for seed in range(2 * MOST)]
    ends: list[float] = []
    while not ends or ends[-1] - start < seconds or len({end for end in ends if end - start >= seconds / 4}) < _FEWEST:
        ends.append(under_way.pop(0).result())
        under_way.append(submit(len(ends) + len(under_way)))
    last = ends[-1]
    ends += [future.result() for future in under_way]
    counted = sorted(end for end in ends if seconds / 4 <= end - start and end <= last)
    return 1 / statistics.linear_regression(range(len(counted)), counted).slope


def measure_load(submit: Submit, rate: float, seconds: float, seed: int) -> dict[str, float]:
    """Requests that come by Poisson's law: how many were done a second, and how long they took.

    As many come as the rate makes, each at any time: so it is by that law, given their number.
    """
    chance = random.Random(seed)
    came: list[float] = []
    futures: list[Future[float]] = []
    start = time.perf_counter()
    for due in sorted(start + chance.uniform(0, seconds) for _ in range(round(rate * seconds))):
        time.sleep(max(0.0, due - time.perf_counter()))
        came.append(due)
        futures.append(submit(len(came)))
    ends = [future.result() for future in futures]
    latencies = sorted(end - begun for end, begun in zip(ends, came, strict=True))
    cuts = statistics.quantiles(latencies, n=100, method="inclusive")
    return {
        "requests": len(latencies),
        "per_s": len(latencies) / (max(ends) - start),
        "p50_s": cuts[49],
        "p95_s": cuts[94],
        "mean_s": statistics.mean(latencies),
    }


def measure_ways(
    shared: SharedPipeline,
    call: dict[str, Any],
    capacity: dict[str, float],
    load: float,
    seconds: float,
    keep: Callable[[dict[str, Any]], None],
) -> None:
    """All ways at one load, with the same requests at the same times."""
    rate = load * capacity["whole requests"]
    for name, way in WAYS.items():
        row = {"way": name, "load": load, "asked_per_s": rate}
        if name == SMALLER and load != COMPARED:
            continue
        if name == ALONE and rate > capacity[name]:
            keep({**row, "skipped": "its queue would grow for ever"})
            continue
        with way(shared, call) as submit:
            told = measure_load(submit, rate, seconds, seed=round(100 * load))
        keep({**row, **told})


def main() -> None:
    """Measure all three, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--loads", type=float, nargs="*", default=LOADS, help="shares of whole requests' capacity")
    parser.add_argument("--tiny", action="store_true", help="a small model, to see that it works")
    parser.add_argument("--only", type=int, help="make the graph of one size of batch, and end")
    parser.add_argument("--commit")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    work = make_job_spec(options.device, tiny=options.tiny)
    if options.only:
        make_shared(work, [options.only])
        return
    if not options.tiny:
        fill_cache(options.device)
    shared, call = make_shared(work, list_sizes())
    gc.freeze()  # as a worker of the service does
    result: dict[str, Any] = {
        **describe_run(options.commit or read_commit()),
        "device": options.device,
        "work": f"{'a tiny one' if options.tiny else work.model}, {work.dtype}, {work.call}",
        "rows": [],
    }

    def keep(row: dict[str, Any]) -> None:
        result["rows"].append(row)
        print(json.dumps(row), flush=True)
        if options.json:
            options.json.write_text(json.dumps(result, indent=1) + "\n")

    for size in list_sizes():
        with running_ahead(shared):
            seconds = [time_batch(shared, call, size) for _ in range(4)]
        keep({"pictures_at_once": size, "median_s": statistics.median(seconds[1:])})
    capacity: dict[str, float] = {}
    for name, way in WAYS.items():
        with way(shared, call) as submit:
            capacity[name] = measure_capacity(submit, options.seconds / 2)
        keep({"way": name, "load": "full", "per_s": capacity[name]})
    for load in options.loads:
        measure_ways(shared, call, capacity, load, options.seconds, keep)


if __name__ == "__main__":
    main()
