"""Mixed load on a service with the embedded model, and the growth of its memory.

    python -m benchmarks.serve_load --minutes 60 --json benchmarks/results/serve_load_cpu.json

Clients request images with and without previews, edit images, cancel, disconnect, send invalid requests and
delete jobs. The memory of the service and its worker is read twice per second, after every client has done each of
these once. It is flat if the mean of the last quarter is at most 5 % above that of the second; the first fills caches.
"""

import argparse
import io
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
from PIL import Image

from benchmarks.provenance import describe_run, read_commit
from tests.server.live import Live

__all__ = ["Load", "measure"]

FLAT = 0.05
_WARMUP_S = 600
PROMPTS = ("a red apple", "a cat", "a rocket on a light blue background", "a green tree", "a fox and a dog", "a bird")


class Load(threading.Thread):
    """Client that performs random actions."""

    def __init__(
        self, address: str, number: int, stopping: threading.Event, counts: Counter[str], pause_s: float = 0.5
    ) -> None:
        super().__init__(daemon=True)
        self.rng, self.stopping, self.counts, self.pause_s = random.Random(number), stopping, counts, pause_s
        self.warmed_up = threading.Event()
        self.http = httpx.Client(base_url=address, timeout=180)
        stream = io.BytesIO()
        Image.new("RGB", (128, 128), "orange").save(stream, "PNG")
        self.image = stream.getvalue()

    def run(self) -> None:
        """Perform actions until `stopping` is set."""
        actions: list[Callable[[], str]] = [
            self.generate, self.generate, self.generate, self.preview, self.edit, self.cancel, self.disconnect,
            self.send_invalid, self.delete,
        ]  # fmt: skip
        first = actions.copy()  # each action once, to fill caches before the first reading
        with self.http:
            while not self.stopping.is_set():
                self.perform(first.pop() if first else self.rng.choice(actions))
                if not first:
                    self.warmed_up.set()
                self.stopping.wait(0 if first else self.rng.random() * 2 * self.pause_s)

    def perform(self, action: Callable[[], str]) -> None:
        """Perform an action and count its outcome."""
        try:
            self.counts[f"{action.__name__}: {action()}"] += 1
        except httpx.HTTPError as error:
            self.counts[f"{action.__name__}: {type(error).__name__}"] += 1

    def make_request(self, **arguments: Any) -> dict[str, Any]:
        """Return a random request."""
        steps = self.rng.choice((2, 4, 8))
        return {"prompt": self.rng.choice(PROMPTS), "num_inference_steps": steps, **arguments}

    def generate(self) -> str:
        """Generate one or two images in a random format."""
        output_format = self.rng.choice(("png", "jpeg", "webp"))
        request = self.make_request(n=self.rng.choice((1, 1, 2)), output_format=output_format)
        return str(self.http.post("/v1/images/generations", json=request).status_code)

    def preview(self) -> str:
        """Generate an image with previews."""
        request = self.make_request(stream=True, partial_images=2)
        with self.http.stream("POST", "/v1/images/generations", json=request) as response:
            events = [line for line in response.iter_lines() if line.startswith("event: ")]
        return events[-1].removeprefix("event: image_generation.") if events else "nothing"

    def edit(self) -> str:
        """Edit an image."""
        data = {"prompt": self.rng.choice(PROMPTS), "num_inference_steps": "4", "strength": "0.6"}
        response = self.http.post("/v1/images/edits", data=data, files={"image": ("a.png", self.image)})
        return str(response.status_code)

    def cancel(self) -> str:
        """Cancel a job while it runs."""
        job = self.http.post("/v1/jobs", json=self.make_request(num_inference_steps=50)).json().get("id")
        time.sleep(self.rng.random())
        return str(self.http.post(f"/v1/jobs/{job}/cancel").status_code)

    def disconnect(self) -> str:
        """Disconnect before the image is finished."""
        try:
            self.http.post("/v1/images/generations", json=self.make_request(num_inference_steps=50), timeout=0.5)
        except httpx.TimeoutException:
            return "disconnected"
        return "answered"

    def send_invalid(self) -> str:
        """Send an invalid request."""
        invalid = self.rng.choice(({"prompt": "x", "n": 99}, {"prompt": ""}, {"prompt": "x", "size": "9x9"}))
        return str(self.http.post("/v1/images/generations", json=invalid).status_code)

    def delete(self) -> str:
        """List the jobs and delete finished ones."""
        jobs = self.http.get("/v1/jobs?limit=200").json()["data"]
        ended = [job["id"] for job in jobs if job["state"] in ("done", "failed", "cancelled")]
        for job in ended[20:]:
            self.http.delete(f"/v1/jobs/{job}")
        return str(self.http.get("/metrics").status_code)


def measure(seconds: float, data: Path, clients: int = 3, pause_s: float = 0.5) -> dict[str, Any]:
    """Run the load for a time; return the outcomes and the memory growth."""
    live = Live(data, "--max-batch", "4")
    stopping, counts = threading.Event(), Counter[str]()
    readings: list[tuple[float, int, int]] = []
    try:
        service, worker = psutil.Process(live.process.pid), psutil.Process(live.find_worker())
        loads = [Load(live.address, number, stopping, counts, pause_s) for number in range(clients)]
        for load in loads:
            load.start()
        for load in loads:
            if not load.warmed_up.wait(_WARMUP_S):
                raise TimeoutError(f"a client did not finish all actions within {_WARMUP_S} s")
        start = time.monotonic()
        while (now := time.monotonic() - start) < seconds:
            readings.append((now, service.memory_info().rss, worker.memory_info().rss))
            if sys.stderr.isatty():
                print(f"\r{now:6.0f} s, {sum(counts.values())} requests", end="", file=sys.stderr)
            time.sleep(0.5)
        stopping.set()
        for load in loads:
            load.join(120)
        survived = worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE
        with live.http() as http:
            jobs = Counter(job["state"] for job in http.get("/v1/jobs?limit=1000").json()["data"])
            images = [
                line for line in http.get("/metrics").text.splitlines() if line.startswith("anyaccel_images_total")
            ]
    finally:
        live.end()
    return {
        "seconds": seconds,
        "requests": sum(counts.values()),
        "pictures": float(images[0].split()[1]),
        "answers": dict(sorted(counts.items())),
        "jobs_left": dict(jobs),
        "worker_survived": survived,
        "service": _summarize_memory(readings, 1),
        "worker": _summarize_memory(readings, 2),
    }


def _summarize_memory(readings: list[tuple[float, int, int]], column: int) -> dict[str, float]:
    values = [reading[column] for reading in readings]
    quarter = len(values) // 4
    second, last = (statistics.mean(values[index * quarter : (index + 1) * quarter]) for index in (1, 3))
    return {"second_quarter_mib": second / 2**20, "last_quarter_mib": last / 2**20, "growth": last / second - 1}


def main() -> None:
    """Measure; the exit status is 1 if memory grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = {**describe_run(read_commit()), **measure(options.minutes * 60, Path(folder))}
    text = json.dumps(result, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    flat = all(result[process]["growth"] <= FLAT for process in ("service", "worker"))
    sys.exit(0 if flat and result["worker_survived"] else 1)


if __name__ == "__main__":
    main()
