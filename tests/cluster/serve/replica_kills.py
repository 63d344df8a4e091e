"""Kill replicas of a service on Ray Serve under load, and hold each answer against the picture that is made alone.

    python -m tests.cluster.serve.replica_kills --minutes 3

Clients are OpenAI's own. They try nothing again: whatever goes wrong is counted.
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
CLOSE = 2
"""Of 255: how far a pixel may be from the one of the picture that is made alone."""
WAIT_S = 240.0


@dataclass
class Told:
    """What the clients were told."""

    right: int = 0
    wrong: list[str] = field(default_factory=list)
    kills: int = 0
    seconds: list[float] = field(default_factory=list)
    states: Counter[str] = field(default_factory=Counter)
    attempts: int = 0
    """The most often that the service itself began with one job."""


def list_replicas(live: Live) -> list[int]:
    """The processes that make the pictures."""
    found = []
    for child in psutil.Process(live.process.pid).children(recursive=True):
        try:
            if child.cmdline() and child.cmdline()[0].startswith("ray::ServeReplica:anyaccel"):
                found.append(int(child.pid))
        except psutil.Error:
            continue
    return found


def make_alone(model: str | None = None, **call: Any) -> dict[int, Any]:
    """The pictures as the library makes them, one by one."""
    import anyaccel

    made = {}
    for seed in SEEDS:
        options = {"num_inference_steps": STEPS, **call}
        result = anyaccel.generate(PROMPT, model=model, device="cpu", seed=seed, dtype="float32", **options)
        made[seed] = numpy.asarray(result.images[0]).astype(int)
    return made


def read_picture(text: str) -> Any:
    """Pixels of an answer."""
    with Image.open(io.BytesIO(base64.b64decode(text))) as image:
        return numpy.asarray(image.convert("RGB")).astype(int)


class Client(threading.Thread):
    """Asks for pictures until it is told to end, some of them two at a time."""

    def __init__(self, live: Live, expected: Mapping[int, Any], told: Told, number: int) -> None:
        super().__init__(daemon=True)
        self.live, self.expected, self.told, self.ending = live, expected, told, threading.Event()
        self.chance = random.Random(number)

    def run(self) -> None:
        with self.live.openai().with_options(timeout=WAIT_S) as client:
            while not self.ending.is_set():
                self._ask(client)

    def _ask(self, client: Any) -> None:
        count = self.chance.choice((1, 1, 2))
        seed = self.chance.choice(list(self.expected)[: len(self.expected) + 1 - count])
        begun = time.monotonic()
        try:
            answer = client.images.generate(
                prompt=PROMPT, n=count, extra_body={"seed": seed, "num_inference_steps": STEPS}
            )
        except Exception as error:  # noqa: BLE001 - whatever the client raises is a wrong answer
            self.told.wrong.append(f"{type(error).__name__}: {error}")
            return
        self.told.seconds.append(time.monotonic() - begun)
        for place, picture in enumerate(answer.data):
            off = int(abs(read_picture(picture.b64_json) - self.expected[seed + place]).max())
            if off > CLOSE or picture.seed != seed + place:
                self.told.wrong.append(f"seed {seed + place} is off by {off}")
        self.told.right += 1


def kill_under_load(
    live: Live,
    expected: Mapping[int, Any],
    *,
    seconds: float,
    every_s: float,
    clients: int = 3,
    most: int = 10**6,
    least: int = 0,
) -> Told:
    """Load for so long and until so many answers are there, and a kill so often; then every job must end."""
    told, chance = Told(), random.Random(1)
    asking = [Client(live, expected, told, number) for number in range(clients)]
    for client in asking:
        client.start()
    end = time.monotonic() + seconds
    while time.monotonic() < end or (told.right < least and time.monotonic() < end + WAIT_S):
        time.sleep(every_s)
        there = list_replicas(live)
        if there and told.kills < most:
            os.kill(chance.choice(there), signal.SIGKILL)
            told.kills += 1
            print(f"kill {told.kills}: {told.right} right, {len(told.wrong)} wrong", file=sys.stderr, flush=True)
    for client in asking:
        client.ending.set()
    for client in asking:
        client.join(WAIT_S)
    with live.http() as http:
        jobs = http.get("/v1/jobs?limit=1000").json()["data"]
    told.states = Counter(job["state"] for job in jobs)
    told.attempts = max((job["attempts"] for job in jobs), default=0)
    return told


def main() -> None:
    """The long version."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--every", type=float, default=10.0, help="seconds from kill to kill")
    given = parser.parse_args()
    expected = make_alone()
    with tempfile.TemporaryDirectory(prefix="ray") as rays, tempfile.TemporaryDirectory() as data:
        os.environ["RAY_TMPDIR"] = rays
        live = Live(
            Path(data), "--ray", "local", "--device", "cpu", "--replicas", "2", "--dtype", "float32", "--max-batch", "2"
        )
        try:
            told = kill_under_load(live, expected, seconds=60 * given.minutes, every_s=given.every)
        finally:
            live.end()
    took = sorted(told.seconds)
    print(
        json.dumps(
            {
                "kills": told.kills,
                "requests": told.right,
                "wrong": told.wrong,
                "jobs": told.states,
                "most attempts": told.attempts,
                "p50_s": round(took[len(took) // 2], 2),
                "p95_s": round(took[int(len(took) * 0.95)], 2),
                "longest_s": round(took[-1], 2),
            }
        )
    )
    sys.exit(bool(told.wrong) or set(told.states) != {"done"})


if __name__ == "__main__":
    main()
