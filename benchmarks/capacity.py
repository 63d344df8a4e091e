"""Capacity planning: simulate how many devices a load needs, and check the simulation against a measurement.

    python -m benchmarks.capacity                       # the check on this CPU, and the table in docs/scale.md
    python -m benchmarks.capacity --rate 20 --p95 2.0 --price 3.5 --alone 0.38 --together 0.57 0.95 1.71

Requests are batched at every denoising step: with k requests on a device, each takes `curve[k]` seconds. Batches are
padded to the compiled sizes, so three requests take as long as four. A request goes to the replica with the fewest
requests, or waits in one common queue if all slots are in use. Arrivals are Poisson, and replicas are independent.
"""

import argparse
import heapq
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.provenance import describe_run, read_commit

__all__ = ["SimulatedReplica", "find_replicas", "simulate"]

RESULT = Path(__file__).parent / "results" / "capacity_cpu.json"
LOADS = (0.5, 0.8)
BATCH_SIZES = (1, 2, 4, 8)
MAX_REPLICAS = 4096


class SimulatedReplica:
    """Requests on one device: each of k requests progresses by 1 / curve[k] per second."""

    def __init__(self, curve: Mapping[int, float]) -> None:
        self.curve, self.slots = curve, max(curve)
        self.remaining: dict[int, float] = {}
        """Remaining fraction of each request, from 1 to 0."""
        self.now = 0.0

    def advance(self, now: float) -> None:
        """Advance the clock to `now`; no request may finish before that."""
        if self.remaining:
            done = (now - self.now) * self.speed()
            self.remaining = {number: left - done for number, left in self.remaining.items()}
        self.now = now

    def speed(self) -> float:
        """Return the progress of a request per second; the batch is padded to the next compiled size."""
        return 1 / self.curve[min(size for size in self.curve if size >= len(self.remaining))]

    def next_end(self) -> tuple[float, int] | None:
        """Return the time at which the next request finishes, and its number."""
        if not self.remaining:
            return None
        number, left = min(self.remaining.items(), key=lambda item: item[1])
        return self.now + max(left, 0.0) / self.speed(), number


class SimulatedPool:
    """Replicas and the queue of waiting requests."""

    def __init__(self, curve: Mapping[int, float], replicas: int) -> None:
        self.replicas = [SimulatedReplica(curve) for _ in range(replicas)]
        # An event in the heap is stale if its replica's version has changed since.
        self.versions = [0] * replicas
        self.ends: list[tuple[float, int, int]] = []
        self.waiting: deque[int] = deque()
        self.arrivals: dict[int, float] = {}
        self.latencies: list[float] = []

    def next_end(self) -> float:
        """Return the time at which the next request finishes."""
        while self.ends and self.ends[0][2] != self.versions[self.ends[0][1]]:
            heapq.heappop(self.ends)
        return self.ends[0][0] if self.ends else math.inf

    def arrive(self, now: float) -> None:
        """Add a request; it waits if other requests wait or no slot is free."""
        number = len(self.arrivals)
        self.arrivals[number] = now
        if self.waiting or not self._start(number, now):
            self.waiting.append(number)

    def finish_next(self) -> float:
        """Finish the next request, start waiting requests, and return the time."""
        now, index, _ = heapq.heappop(self.ends)
        next_end = self.replicas[index].next_end()
        assert next_end
        self.replicas[index].advance(now)
        del self.replicas[index].remaining[next_end[1]]
        self.latencies.append(now - self.arrivals[next_end[1]])
        self._schedule_end(index)
        while self.waiting and self._start(self.waiting[0], now):
            self.waiting.popleft()
        return now

    def _start(self, number: int, now: float) -> bool:
        index = min(range(len(self.replicas)), key=lambda number: len(self.replicas[number].remaining))
        replica = self.replicas[index]
        if len(replica.remaining) >= replica.slots:
            return False
        replica.advance(now)
        replica.remaining[number] = 1.0
        self._schedule_end(index)
        return True

    def _schedule_end(self, index: int) -> None:
        self.versions[index] += 1
        next_end = self.replicas[index].next_end()
        if next_end:
            heapq.heappush(self.ends, (next_end[0], index, self.versions[index]))


def simulate(curve: Mapping[int, float], rate: float, replicas: int, seconds: float, seed: int = 0) -> dict[str, float]:
    """Return latencies and throughput of a number of replicas at `rate` requests per second."""
    rng, pool = random.Random(seed), SimulatedPool(curve, replicas)
    now, due = 0.0, rng.expovariate(rate)
    while due < seconds or pool.next_end() < math.inf:
        if due < seconds and due <= pool.next_end():
            pool.arrive(due)
            due += rng.expovariate(rate)
        else:
            now = pool.finish_next()
    cuts = statistics.quantiles(pool.latencies, n=100, method="inclusive")
    return {
        "requests": len(pool.latencies),
        "per_s": len(pool.latencies) / now,
        "p50_s": cuts[49],
        "p95_s": cuts[94],
        "mean_s": statistics.mean(pool.latencies),
    }


def find_replicas(curve: Mapping[int, float], rate: float, p95: float) -> int:
    """Return the smallest number of replicas with a 95th percentile latency of at most `p95` seconds."""
    if min(curve.values()) > p95:
        raise SystemExit(f"a single request takes {min(curve.values()):.2f} s: no number of devices reaches {p95} s")
    max_rate = find_max_rate(curve)
    count = max(1, int(rate / max_rate))
    while count <= MAX_REPLICAS:
        if simulate(curve, rate, count, max(200.0, 2000 / rate))["p95_s"] <= p95:
            return count
        count += max(1, count // 50)
    raise SystemExit(f"more than {MAX_REPLICAS} devices are needed")


def find_max_rate(curve: Mapping[int, float]) -> float:
    """Return the maximum images per second of a device, with full batches."""
    return max(size / seconds for size, seconds in curve.items())


def measure_curve(submit: Any, seconds: float) -> dict[int, float]:
    """Return the latency of a request with k concurrent requests, for each k."""
    curve = {}
    for count in BATCH_SIZES:
        latencies: list[float] = []
        end = time.perf_counter() + seconds

        def send_requests(number: int, end: float = end, latencies: list[float] = latencies) -> None:
            while time.perf_counter() < end:
                start = time.perf_counter()
                latencies.append(submit(number).result() - start)

        with ThreadPoolExecutor(count) as threads:
            list(threads.map(send_requests, range(count)))
        curve[count] = statistics.median(latencies)
        print(f"{count} concurrent: {curve[count]:.3f} s each", file=sys.stderr)
    return curve


def measure_leader(rows: int) -> float:
    """Return the rows per second that the main process of a batch can write, with 1 MiB images from instant workers."""
    from collections.abc import Sequence

    from anyaccel.cluster.batch.image_worker import RowImage, WorkerFacts, WorkerSettings
    from anyaccel.cluster.batch.local_worker_pool import Event, RowsFinished, WorkerStarted
    from anyaccel.cluster.batch.manifest import OutputFolder
    from anyaccel.cluster.batch.rows import BatchRow
    from anyaccel.cluster.batch.runner import BatchRun
    from benchmarks.batch import Clock

    facts = WorkerFacts(
        pipeline="", parameters=("prompt",), revision=None, device="", virtual=False, dtype="float32",
        rows_per_call=1, load_s=0.0,
    )  # fmt: skip

    class InstantPool:
        def __init__(self) -> None:
            self.events: deque[Event] = deque()

        def start(self, worker: int, settings: WorkerSettings) -> None:
            self.events.append(WorkerStarted(worker, facts))

        def submit(self, worker: int, rows: Sequence[BatchRow]) -> None:
            images = [RowImage(row=row.number, content=b"p" * 2**20, device="", dtype="", seconds=0.0) for row in rows]
            self.events.append(RowsFinished(worker, list(images)))

        def wait(self, seconds: float) -> list[Event]:
            return [self.events.popleft()] if self.events else []

        def stop(self) -> None:
            self.events.clear()

    batch_rows = [BatchRow(number=number + 1, prompt="x", seed=number) for number in range(rows)]
    with tempfile.TemporaryDirectory() as path, OutputFolder(Path(path), {"model": ""}) as folder:
        clock = Clock(1)
        BatchRun(folder, batch_rows, InstantPool(), [WorkerSettings()], clock).run()
    return rows / (clock.end - clock.start)


def measure_jobs(count: int) -> float:
    """Return the jobs per second that the service can store: submit, start, and finish with a 1 MiB image."""
    from anyaccel.server.jobs.store import JobStore

    with tempfile.TemporaryDirectory() as path:
        jobs = JobStore(Path(path))
        start = time.perf_counter()
        for number in range(count):
            jobs.submit({"prompt": "x", "seed": number})
            job = jobs.take()
            assert job
            jobs.finish(job.id, [("0.png", b"p" * 2**20)], {})
        seconds = time.perf_counter() - start
        jobs.close()
    return count / seconds


def check() -> dict[str, Any]:
    """Measure a curve on this CPU, predict the latencies of random requests, and measure them too."""
    from benchmarks.serving import make_job_spec, make_shared, measure_load, step_batching

    shared, call = make_shared(make_job_spec("cpu", tiny=True), BATCH_SIZES)
    rows = []
    with step_batching(shared, call) as submit:
        curves = [measure_curve(submit, 4.0)]
        for load in LOADS:
            rate = load * find_max_rate(curves[-1])
            measured = measure_load(submit, rate, 40.0, seed=1)
            curves.append(measure_curve(submit, 4.0))  # before and after, because timings on a shared machine vary
            curve = {size: statistics.mean(curve[size] for curve in curves[-2:]) for size in BATCH_SIZES}
            predicted = simulate(curve, rate, 1, 40.0, seed=1)
            row = {"load": load, "asked_per_s": rate, "curve_s": curve, "measured": measured, "predicted": predicted}
            rows.append(row)
    return {"curves_s": curves, "rows": rows, "leader_rows_per_s": measure_leader(300), "jobs_per_s": measure_jobs(300)}


def main() -> None:
    """Run the check, or print the number of devices for a load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, help="Requests per second.")
    parser.add_argument("--p95", type=float, help="95th percentile latency in seconds.")
    parser.add_argument("--alone", type=float, help="Latency of a single request on a device in seconds.")
    parser.add_argument(
        "--together", type=float, nargs="+", help="Latencies of 2, 4, 8, … concurrent requests on a device."
    )
    parser.add_argument("--price", type=float, default=0.0, help="Price of one device per hour.")
    options = parser.parse_args()
    if options.rate:
        curve = {1: options.alone, **{2 ** (n + 1): seconds for n, seconds in enumerate(options.together)}}
        count = find_replicas(curve, options.rate, options.p95)
        simulated = simulate(curve, options.rate, count, max(200.0, 2000 / options.rate))
        cost = count * options.price / 3600 / options.rate * 1000
        print(json.dumps({"devices": count, **simulated, "price_of_1000_images": cost}, indent=1))
        return
    report = {**describe_run(read_commit()), "evidence": "cpu", **check()}
    RESULT.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
