"""Videos on Ray replicas, with OpenAI's client and a tiny Wan."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from anyaccel.media.decode import decode_video
from tests.cluster.serve.replica_kills import list_replicas
from tests.conftest import NEEDS_RECIPES
from tests.server.kills import save_video_model
from tests.server.live import Live

pytestmark = [NEEDS_RECIPES, pytest.mark.slow, pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")]
SHORT: dict[str, Any] = {"seed": 7, "num_inference_steps": 2, "num_frames": 5}
LONG: dict[str, Any] = {"prompt": "a fox", "size": "32x32", "seed": 7, "num_inference_steps": 1000, "num_frames": 5}


@pytest.mark.usefixtures("ray_folder")
def test_videos_are_generated_cancelled_and_survive_a_dead_replica(tmp_path: Path) -> None:
    live = Live(
        tmp_path / "data", save_video_model(tmp_path / "wan"), "--ray", "local", "--device", "cpu", "--replicas", "1",
        "--dtype", "float32", "--sizes", "32x32", "--limit", "max_steps=1000",
    )  # fmt: skip
    try:
        client: Any = live.openai()
        video = client.videos.create_and_poll(prompt="a fox", size="32x32", extra_body=SHORT, poll_interval_ms=200)
        assert video.status == "completed", video.error
        content = client.videos.download_content(video.id).content
        assert len(decode_video(content, max_frames=10, max_pixels=10**6)) == 5
        assert client.videos.download_content(video.id, variant="thumbnail").content
        remix = client.videos.poll(client.videos.remix(video.id, prompt="a fox").id, poll_interval_ms=200)
        assert client.videos.download_content(remix.id).content == content, "the same prompt and seed"
        with live.http() as http:
            assert count_saved_frames(live, http) == [1, 2, 3, 4, 5]
            job = http.post("/v1/videos", json=LONG).json()["id"]
            live.wait_state(http, job, "running")
            http.post(f"/v1/jobs/{job}/cancel")
            live.wait_state(http, job, "cancelled")
            job = http.post("/v1/videos", json={**LONG, "num_inference_steps": 200}).json()["id"]
            live.wait_state(http, job, "running")
            for replica in list_replicas(live):
                os.kill(replica, signal.SIGKILL)
            done = live.wait_state(http, job, "done", "failed", seconds=400)
            assert (done["error"], done["attempts"]) == (None, 1)
    finally:
        assert live.end() == 0


def count_saved_frames(live: Live, http: Any) -> list[int]:
    """Return the numbers of encoded frames that the events of a video report."""
    job = http.post("/v1/videos", json={"prompt": "a cat", "size": "32x32", **SHORT}).json()["id"]
    frames, kind = [], ""
    with http.stream("GET", f"/v1/jobs/{job}/events") as response:
        for line in response.iter_lines():
            if line.startswith("event: "):
                kind = line.removeprefix("event: ")
            elif line.startswith("data: ") and kind == "save":
                frames.append(json.loads(line.removeprefix("data: "))["done"])
    return frames
