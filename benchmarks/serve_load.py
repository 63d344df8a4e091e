"""Mixed load on a service with the embedded model and tiny video models, and the growth of its memory.

    python -m benchmarks.serve_load --minutes 60 --json benchmarks/results/serve_load_cpu.json

Clients request images with and without previews, edit images, generate, remix and download videos, cancel, disconnect,
send invalid requests and delete jobs. The memory of all processes of the service is read every two seconds, after every
client has done each of these once. It is flat if the mean of the last quarter is at most 5 % above that of the second;
the first fills caches.
"""

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from benchmarks.host_memory import read_status
from benchmarks.provenance import describe_run, read_commit
from benchmarks.serve_clients import ImageClient, MediaClient
from tests.server.live import Live

__all__ = ["FLAT", "PROCESSES", "measure", "save_models"]

FLAT = 0.05
PROCESSES = ("service", "worker", "other")
"""The process that serves HTTP, the one that runs the models, and the sum of all others."""
_WARMUP_S = 1800
_INTERVAL_S = 2.0
_POINTS = 120


def save_models(folder: Path) -> list[str]:
    """Save tiny models for masks, videos and videos with audio; return the arguments with which they are served."""
    from anyaccel.recipes import recipes

    arguments = []
    for name, recipe in (("sd", "stable-diffusion"), ("wan", "wan"), ("ltx", "ltx-2")):
        pipe: Any = recipes()[recipe].make()
        pipe.save_pretrained(folder / name)
        arguments.append(f"{name}={folder / name}")
    return arguments


def measure(
    seconds: float, data: Path, clients: int = 3, pause_s: float = 0.5, models: list[str] | None = None
) -> dict[str, Any]:
    """Run the load for a time; return the outcomes and the memory growth. Masks and videos require `models`."""
    sizes = ("--sizes", "64x64,32x32") if models else ()  # the tiny models support no large ones
    live = Live(data, "embedded", *(models or ()), *sizes, "--max-batch", "4")
    stopping, counts = threading.Event(), Counter[str]()
    make_client = MediaClient if models else ImageClient
    try:
        worker = psutil.Process(live.find_worker())
        loads = [make_client(live.address, number, stopping, counts, pause_s) for number in range(clients)]
        for load in loads:
            load.start()
        for load in loads:
            if not load.warmed_up.wait(_WARMUP_S):
                raise TimeoutError(f"a client did not finish all actions within {_WARMUP_S} s: {counts}")
        readings = _read_memory(live, worker, seconds, counts)
        stopping.set()
        for load in loads:
            load.join(240)
        survived = worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE
        with live.http() as http:
            jobs = Counter(job["state"] for job in http.get("/v1/jobs?limit=1000").json()["data"])
            metrics = http.get("/metrics").text
    finally:
        live.end()
    return {
        "seconds": seconds,
        "requests": sum(counts.values()),
        "images": _find_metric(metrics, "anyaccel_images_total"),
        "answers": dict(sorted(counts.items())),
        "jobs_left": dict(jobs),
        "worker_survived": survived,
        **{name: _summarize([reading[name] for reading in readings]) for name in PROCESSES},
        "total": _summarize([sum(reading[name] for name in PROCESSES) for reading in readings]),
        "anonymous": _summarize([reading["anonymous"] for reading in readings]),
        "series": _thin(readings),
    }


def _read_memory(live: Live, worker: psutil.Process, seconds: float, counts: Counter[str]) -> list[dict[str, float]]:
    """Return readings of the memory in MiB: the resident memory of each process, and the anonymous one of all."""
    readings: list[dict[str, float]] = []
    service = psutil.Process(live.process.pid)
    start = time.monotonic()
    while (now := time.monotonic() - start) < seconds:
        reading = {"seconds": now, **dict.fromkeys((*PROCESSES, "anonymous"), 0.0)}
        for process in (service, *service.children(recursive=True)):
            name = "service" if process == service else "worker" if process == worker else "other"
            try:
                status = read_status(process.pid)
            except (FileNotFoundError, ProcessLookupError):
                continue  # a child process that has ended since it was listed
            anonymous = status["RssAnon"] + status["RssShmem"]
            reading[name] += (anonymous + status["RssFile"]) / 2**20
            reading["anonymous"] += anonymous / 2**20
        readings.append(reading)
        if sys.stderr.isatty():
            print(f"\r{now:6.0f} s, {sum(counts.values())} requests", end="", file=sys.stderr)
        time.sleep(_INTERVAL_S)
    return readings


def _summarize(values: list[float]) -> dict[str, float]:
    quarter = len(values) // 4
    second, last = (statistics.mean(values[index * quarter : (index + 1) * quarter]) for index in (1, 3))
    growth = last / second - 1 if second else 0.0
    return {"second_quarter_mib": second, "last_quarter_mib": last, "max_mib": max(values), "growth": growth}


def _thin(readings: list[dict[str, float]]) -> list[dict[str, float]]:
    """Return the means of at most `_POINTS` groups of consecutive readings, for a chart."""
    size = -(-len(readings) // _POINTS)
    groups = [readings[start : start + size] for start in range(0, len(readings), size)]
    names = ("seconds", *PROCESSES, "anonymous")
    return [{name: round(statistics.mean(row[name] for row in group), 1) for name in names} for group in groups]


def _find_metric(metrics: str, name: str) -> float:
    return sum(float(line.split()[1]) for line in metrics.splitlines() if line.startswith(name))


def main() -> None:
    """Measure; the exit status is 1 if memory grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    run = describe_run(read_commit())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = save_models(folder)
        result = {**run, **measure(options.minutes * 60, folder / "data", models=models)}
    text = json.dumps(result, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    flat = all(result[name]["growth"] <= FLAT for name in ("service", "worker", "total", "anonymous"))
    sys.exit(0 if flat and result["worker_survived"] else 1)


if __name__ == "__main__":
    main()
