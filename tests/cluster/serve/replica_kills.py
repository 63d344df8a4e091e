"""Stress test of a service on Ray Serve: kills replicas under load and compares every image with a reference.

    python -m tests.cluster.serve.replica_kills --minutes 3

The test uses the OpenAI client without retries and counts every error.
"""

import argparse
import base64
import io
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import psutil
from PIL import Image

from tests.server.live import Live

STEPS, SEEDS = 6, range(100, 106)
PROMPT = "a red apple"
TOLERANCE = 2
"""Maximum difference of a color value (0 to 255) from the reference image."""
WAIT_S = 240.0


@dataclass
class LoadResult:
    """Results of the clients' requests."""

    correct: int = 0
    wrong: list[str] = field(default_factory=list)
    kills: int = 0
    seconds: list[float] = field(default_factory=list)
    states: Counter[str] = field(default_factory=Counter)
    attempts: int = 0
    """Maximum number of attempts of one job."""


def list_replicas(live: Live) -> list[int]:
    """Return the process ids of the replicas."""
    replicas = []
    for child in psutil.Process(live.process.pid).children(recursive=True):
        try:
            if child.cmdline() and child.cmdline()[0].startswith("ray::ServeReplica:anyaccel"):
                replicas.append(int(child.pid))
        except psutil.Error:
            continue
    return replicas


def generate_references(model: str | None = None, **call: Any) -> dict[int, Any]:
    """Return the images of all seeds, generated one by one with the library."""
    import anyaccel

    images = {}
    for seed in SEEDS:
        options = {"num_inference_steps": STEPS, **call}
        result = anyaccel.generate(PROMPT, model=model, device="cpu", seed=seed, dtype="float32", **options)
        images[seed] = numpy.asarray(result.images[0]).astype(int)
    return images


def decode_image(text: str) -> Any:
    """Return the pixels of a base64-encoded image."""
    with Image.open(io.BytesIO(base64.b64decode(text))) as image:
        return numpy.asarray(image.convert("RGB")).astype(int)


class Client(threading.Thread):
    """Client that requests one or two images at a time until `stopping` is set."""

    def __init__(self, live: Live, expected: Mapping[int, Any], result: LoadResult, number: int) -> None:
        super().__init__(daemon=True)
        self.live, self.expected, self.result, self.stopping = live, expected, result, threading.Event()
        self.rng = random.Random(number)

    def run(self) -> None:
        with self.live.openai().with_options(timeout=WAIT_S) as client:
            while not self.stopping.is_set():
                self._request(client)

    def _request(self, client: Any) -> None:
        count = self.rng.choice((1, 1, 2))
        seed = self.rng.choice(list(self.expected)[: len(self.expected) + 1 - count])
        start = time.monotonic()
        try:
            response = client.images.generate(
                prompt=PROMPT, n=count, extra_body={"seed": seed, "num_inference_steps": STEPS}
            )
        except Exception as error:  # noqa: BLE001 - every exception counts as a wrong response
            self.result.wrong.append(f"{type(error).__name__}: {error}")
            return
        self.result.seconds.append(time.monotonic() - start)
        for index, image in enumerate(response.data):
            difference = int(abs(decode_image(image.b64_json) - self.expected[seed + index]).max())
            if difference > TOLERANCE or image.seed != seed + index:
                self.result.wrong.append(f"seed {seed + index} differs by {difference}")
        self.result.correct += 1


def kill_under_load(
    live: Live,
    expected: Mapping[int, Any],
    *,
    seconds: float,
    every_s: float,
    clients: int = 3,
    max_kills: int = 10**6,
    min_responses: int = 0,
) -> LoadResult:
    """Run clients for some time and until enough responses have arrived; kill a replica periodically."""
    result, rng = LoadResult(), random.Random(1)
    threads = [Client(live, expected, result, number) for number in range(clients)]
    for client in threads:
        client.start()
    end = time.monotonic() + seconds
    while time.monotonic() < end or (result.correct < min_responses and time.monotonic() < end + WAIT_S):
        time.sleep(every_s)
        replicas = list_replicas(live)
        if replicas and result.kills < max_kills:
            os.kill(rng.choice(replicas), signal.SIGKILL)
            result.kills += 1
            print(
                f"kill {result.kills}: {result.correct} correct, {len(result.wrong)} wrong", file=sys.stderr, flush=True
            )
    for client in threads:
        client.stopping.set()
    for client in threads:
        client.join(WAIT_S)
    with live.http() as http:
        jobs = http.get("/v1/jobs?limit=1000").json()["data"]
    result.states = Counter(job["state"] for job in jobs)
    result.attempts = max((job["attempts"] for job in jobs), default=0)
    return result


def main() -> None:
    """Run the stress test and print its result as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--every", type=float, default=10.0, help="Seconds between kills.")
    options = parser.parse_args()
    expected = generate_references()
    with tempfile.TemporaryDirectory(prefix="ray") as ray_folder, tempfile.TemporaryDirectory() as data:
        os.environ["RAY_TMPDIR"] = ray_folder
        live = Live(
            Path(data), "--ray", "local", "--device", "cpu", "--replicas", "2", "--dtype", "float32", "--max-batch", "2"
        )
        try:
            result = kill_under_load(live, expected, seconds=60 * options.minutes, every_s=options.every)
        finally:
            live.end()
    latencies = sorted(result.seconds)
    print(
        json.dumps(
            {
                "kills": result.kills,
                "requests": result.correct,
                "wrong": result.wrong,
                "jobs": result.states,
                "most attempts": result.attempts,
                "p50_s": round(latencies[len(latencies) // 2], 2),
                "p95_s": round(latencies[int(len(latencies) * 0.95)], 2),
                "longest_s": round(latencies[-1], 2),
            }
        )
    )
    sys.exit(bool(result.wrong) or set(result.states) != {"done"})


if __name__ == "__main__":
    main()
