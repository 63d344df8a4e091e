"""A real service in its own process, for end-to-end tests."""

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
"""Seconds to wait for the start; a busy test machine is many times slower than an idle one."""


class Live:
    """`anyaccel serve` on a free port, with its standard error in `lines`."""

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
        """Wait until the service is ready and return its URL."""
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            matches = [match for line in list(self.lines) if (match := re.fullmatch(r"ready: (http://\S+)", line))]
            if matches:
                return matches[-1][1]
            assert self.process.poll() is None, "\n".join(self.lines)
            time.sleep(0.05)
        raise AssertionError("\n".join(self.lines))

    def openai(self, key: str | None = None, **options: Any) -> openai.OpenAI:
        """Return OpenAI's client without retries; it is closed when the service ends."""
        key = key or self.key or "none"
        client = openai.OpenAI(base_url=f"{self.address}/v1", api_key=key, max_retries=0, timeout=180, **options)
        self.clients.append(client)  # if it were garbage-collected while open, Python could warn about an open socket
        return client

    def http(self, key: str | None = None) -> httpx.Client:
        """Return an httpx client."""
        key = key or self.key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.address, headers=headers, timeout=180)

    def wait_state(self, client: httpx.Client, job: str, *states: str, seconds: float = 180) -> dict[str, Any]:
        """Wait until a job is in one of the states and return its JSON."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            current: dict[str, Any] = client.get(f"/v1/jobs/{job}").json()
            if current["state"] in states:
                return current
            time.sleep(0.05)
        raise AssertionError(current)

    def find_worker(self) -> int:
        """Return the process id of the worker."""
        import psutil

        for child in psutil.Process(self.process.pid).children(recursive=True):
            if "spawn_main" in " ".join(child.cmdline()):
                return int(child.pid)
        raise AssertionError("no worker process")

    def end(self, signal_number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal, wait for the end and return the exit status."""
        for client in self.clients:
            client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal_number)
        status = self.process.wait(240)
        self.reader.join(10)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return status
