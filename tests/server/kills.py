"""Kill the service with SIGKILL at random times under load, and check every job that it accepted.

    python -m tests.server.kills 50
    python -m tests.server.kills 50 videos --json benchmarks/results/kills_videos_cpu.json

Clients send jobs with unique idempotency keys, and repeat a request with the same key if its response is lost.
"""

import argparse
import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from anyaccel.media.decode import decode_video
from benchmarks.provenance import describe_run, read_commit
from tests.server.live import Live

STUCK_S = 240
"""After the last kill, a job must end at least this often."""
IMAGE: dict[str, Any] = {"prompt": "a red apple", "num_inference_steps": 2}
VIDEO: dict[str, Any] = {"prompt": "a red apple", "num_inference_steps": 2, "size": "32x32", "num_frames": 61}
"""Jobs of the clients. The tiny Wan supports at most 63 frames."""


@dataclass
class Observations:
    """Responses that the clients received."""

    accepted: dict[str, int] = field(default_factory=dict)
    """Seed of each accepted job."""
    jobs: dict[str, str] = field(default_factory=dict)
    """Job of each idempotency key."""
    done: dict[str, float] = field(default_factory=dict)
    """Time at which each finished job ended."""
    attempts: Counter[int] = field(default_factory=Counter)
    """Number of jobs by how often they were started, after the last kill; 2 for those that a kill interrupted."""
    errors: list[str] = field(default_factory=list)


class Client(threading.Thread):
    """Sends jobs and reads their states until `ending` is set."""

    def __init__(self, observations: Observations, number: int, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.body = body
        self.observations, self.number, self.address, self.ending = observations, number, "", threading.Event()
        self.sent = 0

    def run(self) -> None:
        rng = random.Random(self.number)
        while not self.ending.is_set():
            key = f"{self.number}/{self.sent}"
            try:
                self._send(key, seed=self.number * 1000 + self.sent)
                self.sent += 1
            except (httpx.HTTPError, KeyError):
                time.sleep(0.05)  # the service is down: repeat the request with the same key
            time.sleep(0.2 + rng.random())

    def _send(self, key: str, seed: int) -> None:
        with httpx.Client(base_url=self.address or "http://127.0.0.1:9", timeout=5) as http:
            response = http.post("/v1/jobs", json={**self.body, "seed": seed}, headers={"Idempotency-Key": key})
            if response.status_code in (429, 503):
                raise httpx.HTTPError("try later")
            job = response.json()["id"]
            if self.observations.jobs.setdefault(key, job) != job:
                self.observations.errors.append(f"{key} became two jobs")
            self.observations.accepted[job] = seed
            check_finished(self.observations, http.get("/v1/jobs?limit=1000").json()["data"])


def check_finished(observations: Observations, jobs: list[dict[str, Any]]) -> None:
    """Check that a finished job does not run again."""
    for job in jobs:
        if job["state"] == "done" and observations.done.setdefault(job["id"], job["ended_at"]) != job["ended_at"]:
            observations.errors.append(f"{job['id']} was finished twice")


def kill_repeatedly(
    kills: int, data: Path, seed: int = 0, models: tuple[str, ...] = (), body: dict[str, Any] = IMAGE
) -> tuple[Observations, Counter[str]]:
    """Kill the service `kills` times, let it finish all jobs, and return the observations and the final states."""
    rng, observations = random.Random(seed), Observations()
    clients = [Client(observations, number, body) for number in range(3)]
    for client in clients:
        client.start()
    for kill in range(kills):
        service = Live(data, *models, "--max-batch", "2", "--max-queue", "1000", wait=False)
        started = rng.random() < 0.8  # otherwise it is killed while it starts
        if started:
            service.address = service.wait_ready()
            for client in clients:
                client.address = service.address
        time.sleep(rng.random() * 4)
        service.end(signal.SIGKILL)
        print(f"kill {kill + 1} of {kills}: {len(observations.accepted)} jobs accepted", file=sys.stderr, flush=True)
    for client in clients:
        client.ending.set()
        client.join()
    service = Live(data, *models, "--max-batch", "4", "--max-queue", "1000")
    try:
        return observations, _check_jobs(service, observations)
    finally:
        service.end()


def _check_jobs(service: Live, observations: Observations) -> Counter[str]:
    with service.http() as http:
        left, end = -1, 0.0
        while True:
            jobs = {job["id"]: job for job in http.get("/v1/jobs?limit=1000").json()["data"]}
            before, left = left, sum(job["state"] not in ("done", "failed") for job in jobs.values())
            if left != before:
                end = time.monotonic() + STUCK_S
            if left == 0 or time.monotonic() > end:
                break
            time.sleep(1)
        check_finished(observations, list(jobs.values()))
        observations.attempts = Counter(job["attempts"] for job in jobs.values())
        observations.errors += [f"{name} is lost" for name in observations.accepted if name not in jobs]
        for name, seed in observations.accepted.items():
            job = jobs.get(name)
            if job is None:
                continue
            if job["state"] == "done":
                if not _is_complete(http, job, seed):
                    observations.errors.append(f"{name} has an incomplete or wrong result")
            elif job["state"] != "failed" or job["error"]["code"] != "worker_died":
                observations.errors.append(f"{name} is {job['state']}: {job['error']}")
        return Counter(job["state"] for job in jobs.values())


def _is_complete(http: httpx.Client, job: dict[str, Any], seed: int) -> bool:
    """Return whether a finished job has its image or video, of the right seed."""
    if job["images"]:
        content = http.get(job["images"][0]["url"]).content
        return content.endswith(b"IEND\xaeB`\x82") and bool(job["images"][0]["seed"] == seed)
    (video,) = job["videos"]
    frames = decode_video(http.get(video["url"]).content, max_frames=200, max_pixels=10**6).frames
    return len(frames) == VIDEO["num_frames"] == video["num_frames"] and bool(video["seed"] == seed)


def save_video_model(folder: Path) -> str:
    """Save a tiny Wan model and return the argument with which it is served."""
    from anyaccel.recipes import recipes

    pipe: Any = recipes()["wan"].make()
    pipe.save_pretrained(folder)
    return f"wan={folder}"


def main() -> None:
    """Run with the arguments of the command line; the exit status is 1 if a job was lost, doubled or wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kills", type=int, nargs="?", default=50)
    parser.add_argument("kind", choices=("images", "videos"), nargs="?", default="images")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    start = time.monotonic()
    run = describe_run(read_commit())
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        if options.kind == "videos":
            models = (save_video_model(Path(folder) / "wan"), "--sizes", "32x32")
            observations, states = kill_repeatedly(options.kills, data, models=models, body=VIDEO)
        else:
            observations, states = kill_repeatedly(options.kills, data)
    result = {
        **run,
        "kind": options.kind,
        "kills": options.kills,
        "seconds": round(time.monotonic() - start),
        "accepted": len(observations.accepted),
        "states": dict(states),
        "attempts": dict(observations.attempts),
        "errors": observations.errors,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    sys.exit(bool(observations.errors))


if __name__ == "__main__":
    main()
