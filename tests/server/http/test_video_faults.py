"""Videos when the disk is full, with clients that stop reading, and cancelled while they are encoded."""

import json
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from tests.conftest import NEEDS_RECIPES
from tests.server.kills import save_video_model
from tests.server.live import Live

pytestmark = [NEEDS_RECIPES, pytest.mark.slow]
VIDEO: dict[str, Any] = {"prompt": "a fox", "size": "32x32", "num_frames": 61, "num_inference_steps": 2}
SEND_S = 2


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    model = save_video_model(tmp_path_factory.mktemp("models") / "wan")
    live = Live(
        tmp_path_factory.mktemp("data"), model, "--device", "cpu", "--dtype", "float32", "--sizes", "32x32",
        "--limit", f"send_s={SEND_S}", "--limit", "body_s=5",
    )  # fmt: skip
    yield live
    assert live.end() == 0


def submit(http: httpx.Client, **changes: Any) -> str:
    response = http.post("/v1/videos", json={**VIDEO, **changes})
    assert response.status_code == 200, response.text
    return str(response.json()["id"])


def list_result_files(live: Live) -> list[Path]:
    return [path for path in (live.data / "results").rglob("*") if path.is_file()]


def test_a_full_disk_fails_the_video_and_not_the_service(service: Live) -> None:
    """The service can write no files of more than 1 KB, and no transactions, while a video is generated."""
    process = psutil.Process(service.process.pid)
    before = list_result_files(service)
    with service.http() as http:
        video = submit(http)
        service.wait_state(http, video, "running")
        unlimited = process.rlimit(resource.RLIMIT_FSIZE)
        process.rlimit(resource.RLIMIT_FSIZE, (1000, unlimited[1]))
        try:
            end = time.monotonic() + 180
            while not any("failed to store the result" in line for line in list(service.lines)):
                assert time.monotonic() < end, service.lines[-5:]
                time.sleep(0.1)
            rejected = http.post("/v1/videos", json=VIDEO)
            assert (rejected.status_code, rejected.json()["error"]["code"]) == (503, "storage")
            assert http.get("/healthz").status_code == 200
        finally:
            process.rlimit(resource.RLIMIT_FSIZE, unlimited)
        failed = service.wait_state(http, video, "failed", seconds=240)
        assert failed["error"]["code"] == "storage"
        assert http.get(f"/v1/videos/{video}").json()["status"] == "failed"
        assert list_result_files(service) == before, "no part of the video is left"
        again = submit(http, num_frames=5)
        assert service.wait_state(http, again, "done", "failed")["error"] is None


def test_a_video_is_cancelled_while_it_is_encoded(service: Live) -> None:
    before = list_result_files(service)
    with service.http() as http:
        video = submit(http, num_inference_steps=1)
        saved = []
        with http.stream("GET", f"/v1/jobs/{video}/events") as response:
            kind = ""
            for line in response.iter_lines():
                if line.startswith("event: "):
                    kind = line.removeprefix("event: ")
                elif line.startswith("data: ") and kind == "save":
                    saved.append(json.loads(line.removeprefix("data: "))["done"])
                    if len(saved) == 1:
                        http.post(f"/v1/jobs/{video}/cancel")
        assert http.get(f"/v1/jobs/{video}").json()["state"] == "cancelled"
        assert saved[-1] < VIDEO["num_frames"], "the encoding was stopped"
        assert list_result_files(service) == before
        content = http.get(f"/v1/videos/{video}/content")
        assert (content.status_code, content.json()["error"]["code"]) == (409, "cancelled")


def test_a_client_that_stops_reading_a_video_is_disconnected(service: Live) -> None:
    address = urlsplit(service.address)
    process = psutil.Process(service.process.pid)
    with service.http() as http:
        video = submit(http, num_frames=5)
        service.wait_state(http, video, "done")
        file = service.data / "results" / video / "0.mp4"
        file.write_bytes(bytes(64 * 2**20))  # larger than the buffers of the sockets
        files, memory = process.num_fds(), process.memory_info().rss
        clients = []
        for _ in range(10):
            client = socket.create_connection((str(address.hostname), int(address.port or 0)), timeout=60)
            client.sendall(f"GET /v1/videos/{video}/content HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            clients.append(client)
        start = time.monotonic()
        assert len(http.get(f"/v1/videos/{video}/content").content) == 64 * 2**20, "other clients are served meanwhile"
        while process.num_fds() > files + 1:
            assert time.monotonic() - start < 20 * SEND_S
            time.sleep(0.1)
        assert process.memory_info().rss - memory < 32 * 2**20, "the file is not read into memory"
        for client in clients:
            client.close()
