"""Kill the service with -9 at random moments under load, and account for every job that it accepted.

    python -m tests.server.kills 50

Clients send jobs all the while, each with a name of its own, and ask again with the same name when an answer is lost.
"""

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

from tests.server.live import Live

LATE_S = 240


@dataclass
class Told:
    """What the clients were told."""

    accepted: dict[str, int] = field(default_factory=dict)
    """Each job that a client was told of, with its seed."""
    names: dict[str, str] = field(default_factory=dict)
    """Which job each name is."""
    done: dict[str, float] = field(default_factory=dict)
    """When a job that was seen to be done ended."""
    wrong: list[str] = field(default_factory=list)


class Client(threading.Thread):
    """Sends jobs for as long as it is let, and asks how they are."""

    def __init__(self, told: Told, number: int) -> None:
        super().__init__(daemon=True)
        self.told, self.number, self.address, self.ending = told, number, "", threading.Event()
        self.sent = 0

    def run(self) -> None:
        chance = random.Random(self.number)
        while not self.ending.is_set():
            name = f"{self.number}/{self.sent}"
            try:
                self._send(name, seed=self.number * 1000 + self.sent)
                self.sent += 1
            except (httpx.HTTPError, KeyError):
                time.sleep(0.05)  # it is down: the same again, under the same name
            time.sleep(0.2 + chance.random())

    def _send(self, name: str, seed: int) -> None:
        with httpx.Client(base_url=self.address or "http://127.0.0.1:9", timeout=5) as http:
            asked = {"prompt": "a red apple", "seed": seed, "num_inference_steps": 2}
            answer = http.post("/v1/jobs", json=asked, headers={"Idempotency-Key": name})
            if answer.status_code in (429, 503):
                raise httpx.HTTPError("later")
            job = answer.json()["id"]
            if self.told.names.setdefault(name, job) != job:
                self.told.wrong.append(f"{name} became two jobs")
            self.told.accepted[job] = seed
            note_states(self.told, http.get("/v1/jobs?limit=1000").json()["data"])


def note_states(told: Told, jobs: list[dict[str, Any]]) -> None:
    """Whatever is done stays as it is."""
    for job in jobs:
        if job["state"] == "done" and told.done.setdefault(job["id"], job["ended_at"]) != job["ended_at"]:
            told.wrong.append(f"{job['id']} was done twice")


def kill_often(kills: int, data: Path, seed: int = 0) -> tuple[Told, Counter[str]]:
    """So many kills, and then a start after which every job ends; what was told, and how the jobs ended."""
    chance, told = random.Random(seed), Told()
    clients = [Client(told, number) for number in range(3)]
    for client in clients:
        client.start()
    for kill in range(kills):
        service = Live(data, "--max-batch", "2", "--max-queue", "1000", wait=False)
        started = chance.random() < 0.8  # else it is killed while it starts
        if started:
            service.address = service.wait_ready()
            for client in clients:
                client.address = service.address
        time.sleep(chance.random() * 4)
        service.end(signal.SIGKILL)
        print(f"kill {kill + 1} of {kills}: {len(told.accepted)} jobs accepted", file=sys.stderr, flush=True)
    for client in clients:
        client.ending.set()
        client.join()
    service = Live(data, "--max-batch", "4", "--max-queue", "1000")
    try:
        return told, _account(service, told)
    finally:
        service.end()


def _account(service: Live, told: Told) -> Counter[str]:
    with service.http() as http:
        end = time.monotonic() + LATE_S
        while True:
            jobs = {job["id"]: job for job in http.get("/v1/jobs?limit=1000").json()["data"]}
            if all(job["state"] in ("done", "failed") for job in jobs.values()) or time.monotonic() > end:
                break
            time.sleep(0.2)
        note_states(told, list(jobs.values()))
        told.wrong += [f"{name} is lost" for name in told.accepted if name not in jobs]
        for name, seed in told.accepted.items():
            job = jobs.get(name)
            if job is None:
                continue
            if job["state"] == "done":
                content = http.get(f"/v1/jobs/{name}/images/0").content
                if not content.endswith(b"IEND\xaeB`\x82") or job["images"][0]["seed"] != seed:
                    told.wrong.append(f"{name} has no whole picture of its own")
            elif not (job["state"] == "failed" and job["error"]["message"]):
                told.wrong.append(f"{name} is {job['state']}")
        return Counter(job["state"] for job in jobs.values())


def main() -> None:
    """Kill as often as the command line says."""
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    with tempfile.TemporaryDirectory() as folder:
        told, states = kill_often(kills, Path(folder))
    print(json.dumps({"kills": kills, "accepted": len(told.accepted), "states": states, "wrong": told.wrong}))
    sys.exit(bool(told.wrong))


if __name__ == "__main__":
    main()
