"""From what one device was measured to do, to how many are needed: a simulation, checked against a measurement.

    python -m benchmarks.capacity                       # the check on this CPU, and the table in docs/scale.md
    python -m benchmarks.capacity --rate 20 --p95 2.0 --price 3.5 --alone 0.38 --together 0.57 0.95 1.71

Pictures are made step by step, and requests join at every step: with k of them under way each takes `curve[k]` seconds
from its first step to its last; batches are filled up to the sizes that are ready, so that three take what four take.
A request goes to the replica that has the fewest. That is all that is simulated: requests come by Poisson's law,
replicas share nothing, and whoever finds all places taken waits in one queue.
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

__all__ = ["Replica", "find_replicas", "simulate"]

RESULT = Path(__file__).parent / "results" / "capacity_cpu.json"
LOADS = (0.5, 0.8)
KINDS = (1, 2, 4, 8)
MOST_REPLICAS = 4096


class Replica:
    """Requests that share a device: with k of them each goes on at 1 / curve[k] a second."""

    def __init__(self, curve: Mapping[int, float]) -> None:
        self.curve, self.places = curve, max(curve)
        self.under_way: dict[int, float] = {}
        """What is left of each, from 1 down to 0."""
        self.now = 0.0

    def advance(self, now: float) -> None:
        """Go on until then, at which nobody ends before."""
        if self.under_way:
            done = (now - self.now) * self.speed()
            self.under_way = {number: left - done for number, left in self.under_way.items()}
        self.now = now

    def speed(self) -> float:
        """How much of a request is done a second: batches are filled up to the next size that is ready."""
        return 1 / self.curve[min(size for size in self.curve if size >= len(self.under_way))]

    def next_end(self) -> tuple[float, int] | None:
        """When somebody ends, and who."""
        if not self.under_way:
            return None
        number, left = min(self.under_way.items(), key=lambda one: one[1])
        return self.now + max(left, 0.0) / self.speed(), number


class Pool:
    """Replicas, who is on each, and who waits for a place."""

    def __init__(self, curve: Mapping[int, float], replicas: int) -> None:
        self.replicas = [Replica(curve) for _ in range(replicas)]
        self.versions = [0] * replicas
        self.ends: list[tuple[float, int, int]] = []
        self.waiting: deque[int] = deque()
        self.came: dict[int, float] = {}
        self.latencies: list[float] = []

    def next_end(self) -> float:
        """When the next request ends, as things stand."""
        while self.ends and self.ends[0][2] != self.versions[self.ends[0][1]]:
            heapq.heappop(self.ends)
        return self.ends[0][0] if self.ends else math.inf

    def come(self, now: float) -> None:
        """A request comes, and waits if others do or no place is free."""
        number = len(self.came)
        self.came[number] = now
        if self.waiting or not self._begin(number, now):
            self.waiting.append(number)

    def end(self) -> float:
        """The next request ends, and those that wait move up."""
        now, place, _ = heapq.heappop(self.ends)
        found = self.replicas[place].next_end()
        assert found
        self.replicas[place].advance(now)
        del self.replicas[place].under_way[found[1]]
        self.latencies.append(now - self.came[found[1]])
        self._plan(place)
        while self.waiting and self._begin(self.waiting[0], now):
            self.waiting.popleft()
        return now

    def _begin(self, number: int, now: float) -> bool:
        place = min(range(len(self.replicas)), key=lambda one: len(self.replicas[one].under_way))
        replica = self.replicas[place]
        if len(replica.under_way) >= replica.places:
            return False
        replica.advance(now)
        replica.under_way[number] = 1.0
        self._plan(place)
        return True

    def _plan(self, place: int) -> None:
        self.versions[place] += 1
        found = self.replicas[place].next_end()
        if found:
            heapq.heappush(self.ends, (found[0], place, self.versions[place]))


def simulate(curve: Mapping[int, float], rate: float, replicas: int, seconds: float, seed: int = 0) -> dict[str, float]:
    """Latencies and throughput of so many replicas with so many requests a second."""
    chance, pool = random.Random(seed), Pool(curve, replicas)
    now, due = 0.0, chance.expovariate(rate)
    while due < seconds or pool.next_end() < math.inf:
        if due < seconds and due <= pool.next_end():
            pool.come(due)
            due += chance.expovariate(rate)
        else:
            now = pool.end()
    cuts = statistics.quantiles(pool.latencies, n=100, method="inclusive")
    return {
        "requests": len(pool.latencies),
        "per_s": len(pool.latencies) / now,
        "p50_s": cuts[49],
        "p95_s": cuts[94],
        "mean_s": statistics.mean(pool.latencies),
    }


def find_replicas(curve: Mapping[int, float], rate: float, p95: float) -> int:
    """The fewest replicas whose 95th percentile is within the limit, if any number of them is."""
    if min(curve.values()) > p95:
        raise SystemExit(
            f"one request alone takes {min(curve.values()):.2f} s: no number of devices makes that {p95} s"
        )
    best = find_best(curve)
    count = max(1, int(rate / best))
    while count <= MOST_REPLICAS:
        if simulate(curve, rate, count, max(200.0, 2000 / rate))["p95_s"] <= p95:
            return count
        count += max(1, count // 50)
    raise SystemExit(f"more than {MOST_REPLICAS} devices would be needed")


def find_best(curve: Mapping[int, float]) -> float:
    """The most pictures a second that a device makes, if requests come as it likes."""
    return max(size / seconds for size, seconds in curve.items())


def measure_curve(submit: Any, seconds: float) -> dict[int, float]:
    """How long a request takes with k under way, for each k."""
    curve = {}
    for count in KINDS:
        latencies: list[float] = []
        end = time.perf_counter() + seconds

        def ask(number: int, end: float = end, latencies: list[float] = latencies) -> None:
            while time.perf_counter() < end:
                begun = time.perf_counter()
                latencies.append(submit(number).result() - begun)

        with ThreadPoolExecutor(count) as threads:
            list(threads.map(ask, range(count)))
        curve[count] = statistics.median(latencies)
        print(f"{count} under way: {curve[count]:.3f} s each", file=sys.stderr)
    return curve


def measure_leader(rows: int) -> float:
    """Rows a second that the leader of a batch can keep: a megabyte each, from workers that take no time."""
    from collections.abc import Sequence

    from anyaccel.cluster.batch.image_worker import RowImage, WorkerFacts, WorkerSettings
    from anyaccel.cluster.batch.manifest import OutputFolder
    from anyaccel.cluster.batch.rows import BatchRow
    from anyaccel.cluster.batch.runner import BatchRun
    from anyaccel.cluster.batch.worker_pool import Event, RowsFinished, WorkerStarted
    from benchmarks.batch import Clock

    facts = WorkerFacts(
        pipeline="", parameters=("prompt",), revision=None, device="", virtual=False, dtype="float32",
        rows_a_call=1, load_s=0.0,
    )  # fmt: skip

    class Instant:
        def __init__(self) -> None:
            self.events: deque[Event] = deque()

        def start(self, worker: int, settings: WorkerSettings) -> None:
            self.events.append(WorkerStarted(worker, facts))

        def give(self, worker: int, rows: Sequence[BatchRow]) -> None:
            made = [RowImage(row=row.number, content=b"p" * 2**20, device="", dtype="", seconds=0.0) for row in rows]
            self.events.append(RowsFinished(worker, list(made)))

        def wait(self, seconds: float) -> list[Event]:
            return [self.events.popleft()] if self.events else []

        def stop(self) -> None:
            self.events.clear()

    asked = [BatchRow(number=number + 1, prompt="x", seed=number) for number in range(rows)]
    with tempfile.TemporaryDirectory() as place, OutputFolder(Path(place), {"model": ""}) as folder:
        clock = Clock(1)
        BatchRun(folder, asked, Instant(), [WorkerSettings()], clock).run()
    return rows / (clock.ended - clock.began)


def measure_jobs(count: int) -> float:
    """Jobs a second that the service can keep: each is accepted, taken and finished with a megabyte, on disk."""
    from anyaccel.server.jobs.store import JobStore

    with tempfile.TemporaryDirectory() as place:
        jobs = JobStore(Path(place))
        begun = time.perf_counter()
        for number in range(count):
            jobs.submit({"prompt": "x", "seed": number})
            taken = jobs.take()
            assert taken
            jobs.finish(taken.id, [("0.png", b"p" * 2**20)], {})
        seconds = time.perf_counter() - begun
        jobs.close()
    return count / seconds


def check() -> dict[str, Any]:
    """Measure a curve on this CPU, predict how long requests at random take, and measure that too."""
    from benchmarks.serving import make_job_spec, make_shared, measure_load, steps_of_all

    shared, call = make_shared(make_job_spec("cpu", tiny=True), KINDS)
    rows = []
    with steps_of_all(shared, call) as submit:
        curves = [measure_curve(submit, 4.0)]
        for load in LOADS:
            rate = load * find_best(curves[-1])
            measured = measure_load(submit, rate, 40.0, seed=1)
            curves.append(measure_curve(submit, 4.0))  # a shared machine is not the same twice: before and after
            curve = {size: statistics.mean(one[size] for one in curves[-2:]) for size in KINDS}
            predicted = simulate(curve, rate, 1, 40.0, seed=1)
            row = {"load": load, "asked_per_s": rate, "curve_s": curve, "measured": measured, "predicted": predicted}
            rows.append(row)
    return {"curves_s": curves, "rows": rows, "leader_rows_per_s": measure_leader(300), "jobs_per_s": measure_jobs(300)}


def main() -> None:
    """The check, or how many devices a wish needs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, help="Requests a second.")
    parser.add_argument("--p95", type=float, help="Seconds that 95 of 100 requests may take.")
    parser.add_argument("--alone", type=float, help="Seconds of a request that is alone on its device.")
    parser.add_argument("--together", type=float, nargs="+", help="Of each of 2, 4, 8, … that share a device.")
    parser.add_argument("--price", type=float, default=0.0, help="Of one device for an hour.")
    options = parser.parse_args()
    if options.rate:
        curve = {1: options.alone, **{2 ** (n + 1): seconds for n, seconds in enumerate(options.together)}}
        count = find_replicas(curve, options.rate, options.p95)
        told = simulate(curve, options.rate, count, max(200.0, 2000 / options.rate))
        cost = count * options.price / 3600 / options.rate * 1000
        print(json.dumps({"devices": count, **told, "price_of_1000_pictures": cost}, indent=1))
        return
    result = {**describe_run(read_commit()), "evidence": "cpu", **check()}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
