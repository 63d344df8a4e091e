"""A real service in a process of its own, for the tests of all that only a running one shows."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai

__all__ = ["Live"]

START_S = 400
"""A machine that others keep busy may take many times as long as one that is idle: waits are long, work is not."""


class Live:
    """`anyaccel serve` on a free port, and what it says."""

    def __init__(self, data: Path, *options: str, key: str | None = None, wait: bool = True) -> None:
        self.data, self.key = data, key
        self.lines: list[str] = []
        self.clients: list[openai.OpenAI] = []
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "anyaccel", "serve", "--port", "0", "--data", str(data), *options]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        if wait:
            self.address = self.wait_ready()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))

    def wait_ready(self) -> str:
        """Wait until it says that it is ready, and where."""
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            found = [one for line in list(self.lines) if (one := re.fullmatch(r"ready: (http://\S+)", line))]
            if found:
                return found[-1][1]
            assert self.process.poll() is None, "\n".join(self.lines)
            time.sleep(0.05)
        raise AssertionError("\n".join(self.lines))

    def openai(self, key: str | None = None, **options: Any) -> openai.OpenAI:
        """OpenAI's own client, which does not try again by itself; it is closed when the service ends."""
        key = key or self.key or "none"
        client = openai.OpenAI(base_url=f"{self.address}/v1", api_key=key, max_retries=0, timeout=180, **options)
        self.clients.append(client)  # whoever leaves it to be found as garbage may be told of an open socket
        return client

    def http(self, key: str | None = None) -> httpx.Client:
        """A plain client."""
        key = key or self.key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.address, headers=headers, timeout=180)

    def wait_state(self, client: httpx.Client, job: str, *states: str, seconds: float = 180) -> dict[str, Any]:
        """Wait until a job is in one of these states."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            told: dict[str, Any] = client.get(f"/v1/jobs/{job}").json()
            if told["state"] in states:
                return told
            time.sleep(0.05)
        raise AssertionError(told)

    def find_worker(self) -> int:
        """The process that makes the pictures."""
        import psutil

        for child in psutil.Process(self.process.pid).children(recursive=True):
            if "spawn_main" in " ".join(child.cmdline()):
                return int(child.pid)
        raise AssertionError("there is no worker")

    def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Tell it to end; its exit status."""
        for client in self.clients:
            client.close()
        if self.process.poll() is None:
            self.process.send_signal(how)
        status = self.process.wait(240)
        self.reader.join(10)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return status
