"""Mixed load on a service with the embedded model, and whether its memory stays flat.

    python -m benchmarks.serve_load --minutes 60 --json benchmarks/results/serve_load_cpu.json

Clients ask for single pictures and several, with and without previews, edit, cancel, go away in the middle, send what
is wrong, and delete. Memory is that of the service and of its worker, read twice a second from when
each client has done each of these once; flat if the mean of the last quarter is at most 5 % above the mean of the
second: the first is left out, in which caches fill.
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
_SETTLE_S = 600
PROMPTS = ("a red apple", "a cat", "a rocket on a light blue background", "a green tree", "a fox and a dog", "a bird")


class Load(threading.Thread):
    """One client, who does whatever comes to his mind."""

    def __init__(
        self, address: str, number: int, ending: threading.Event, seen: Counter[str], pause_s: float = 0.5
    ) -> None:
        super().__init__(daemon=True)
        self.chance, self.ending, self.seen, self.pause_s = random.Random(number), ending, seen, pause_s
        self.settled = threading.Event()
        self.http = httpx.Client(base_url=address, timeout=180)
        stream = io.BytesIO()
        Image.new("RGB", (128, 128), "orange").save(stream, "PNG")
        self.picture = stream.getvalue()

    def run(self) -> None:
        """Ask until it is over."""
        doings: list[Callable[[], str]] = [
            self.make, self.make, self.make, self.watch, self.edit, self.cancel, self.leave, self.err, self.tidy,
        ]  # fmt: skip
        first = doings.copy()  # all there is, at once: what is made for a new shape is made before the first reading
        with self.http:
            while not self.ending.is_set():
                self.do(first.pop() if first else self.chance.choice(doings))
                if not first:
                    self.settled.set()
                self.ending.wait(0 if first else self.chance.random() * 2 * self.pause_s)

    def do(self, doing: Callable[[], str]) -> None:
        """Do it, and count what came of it."""
        try:
            self.seen[f"{doing.__name__}: {doing()}"] += 1
        except httpx.HTTPError as error:
            self.seen[f"{doing.__name__}: {type(error).__name__}"] += 1

    def ask(self, **more: Any) -> dict[str, Any]:
        """A request, each time another."""
        steps = self.chance.choice((2, 4, 8))
        return {"prompt": self.chance.choice(PROMPTS), "num_inference_steps": steps, **more}

    def make(self) -> str:
        """One picture or two, in some format."""
        kind = self.chance.choice(("png", "jpeg", "webp"))
        asked = self.ask(n=self.chance.choice((1, 1, 2)), output_format=kind)
        return str(self.http.post("/v1/images/generations", json=asked).status_code)

    def watch(self) -> str:
        """A picture with previews."""
        asked = self.ask(stream=True, partial_images=2)
        with self.http.stream("POST", "/v1/images/generations", json=asked) as events:
            kinds = [line for line in events.iter_lines() if line.startswith("event: ")]
        return kinds[-1].removeprefix("event: image_generation.") if kinds else "nothing"

    def edit(self) -> str:
        """A picture from a picture."""
        data = {"prompt": self.chance.choice(PROMPTS), "num_inference_steps": "4", "strength": "0.6"}
        answer = self.http.post("/v1/images/edits", data=data, files={"image": ("a.png", self.picture)})
        return str(answer.status_code)

    def cancel(self) -> str:
        """A job that is stopped while it denoises."""
        job = self.http.post("/v1/jobs", json=self.ask(num_inference_steps=50)).json().get("id")
        time.sleep(self.chance.random())
        return str(self.http.post(f"/v1/jobs/{job}/cancel").status_code)

    def leave(self) -> str:
        """Go away before the picture is there."""
        try:
            self.http.post("/v1/images/generations", json=self.ask(num_inference_steps=50), timeout=0.5)
        except httpx.TimeoutException:
            return "left"
        return "answered"

    def err(self) -> str:
        """Ask for what is not there."""
        wrong = self.chance.choice(({"prompt": "x", "n": 99}, {"prompt": ""}, {"prompt": "x", "size": "9x9"}))
        return str(self.http.post("/v1/images/generations", json=wrong).status_code)

    def tidy(self) -> str:
        """Look at what there is, and delete some of it."""
        jobs = self.http.get("/v1/jobs?limit=200").json()["data"]
        ended = [job["id"] for job in jobs if job["state"] in ("done", "failed", "cancelled")]
        for job in ended[20:]:
            self.http.delete(f"/v1/jobs/{job}")
        return str(self.http.get("/metrics").status_code)


def measure(seconds: float, data: Path, clients: int = 3, pause_s: float = 0.5) -> dict[str, Any]:
    """Load for so long, and what came of it."""
    live = Live(data, "--max-batch", "4")
    ending, seen = threading.Event(), Counter[str]()
    readings: list[tuple[float, int, int]] = []
    try:
        service, worker = psutil.Process(live.process.pid), psutil.Process(live.find_worker())
        loads = [Load(live.address, number, ending, seen, pause_s) for number in range(clients)]
        for load in loads:
            load.start()
        for load in loads:
            if not load.settled.wait(_SETTLE_S):
                raise TimeoutError(f"a client did not do everything once in {_SETTLE_S} s")
        start = time.monotonic()
        while (now := time.monotonic() - start) < seconds:
            readings.append((now, service.memory_info().rss, worker.memory_info().rss))
            if sys.stderr.isatty():
                print(f"\r{now:6.0f} s, {sum(seen.values())} requests", end="", file=sys.stderr)
            time.sleep(0.5)
        ending.set()
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
        "requests": sum(seen.values()),
        "pictures": float(images[0].split()[1]),
        "answers": dict(sorted(seen.items())),
        "jobs_left": dict(jobs),
        "worker_survived": survived,
        "service": _look(readings, 1),
        "worker": _look(readings, 2),
    }


def _look(readings: list[tuple[float, int, int]], place: int) -> dict[str, float]:
    values = [reading[place] for reading in readings]
    quarter = len(values) // 4
    second, last = (statistics.mean(values[part * quarter : (part + 1) * quarter]) for part in (1, 3))
    return {"second_quarter_mib": second / 2**20, "last_quarter_mib": last / 2**20, "growth": last / second - 1}


def main() -> None:
    """Measure, and say whether memory stayed flat."""
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
    flat = all(result[part]["growth"] <= FLAT for part in ("service", "worker"))
    sys.exit(0 if flat and result["worker_survived"] else 1)


if __name__ == "__main__":
    main()
