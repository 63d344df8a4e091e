"""A service whose disk is almost full: videos are rejected before they are generated, and accepted again later."""

from pathlib import Path
from typing import Any

import pytest

from anyaccel.recipes import recipes
from tests.conftest import NEEDS_RECIPES
from tests.server.live import Live
from tests.small_disk import fill, mount_small_disk

pytestmark = [
    NEEDS_RECIPES,
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning"),
]


def test_videos_that_do_not_fit_on_the_disk_are_rejected(tmp_path: Path) -> None:
    pipe: Any = recipes()["wan"].make()
    pipe.save_pretrained(tmp_path / "wan")
    with mount_small_disk(tmp_path / "data", 4 * 2**20) as disk:
        live = Live(
            disk, f"wan={tmp_path / 'wan'}", "--device", "cpu", "--dtype", "float32", "--sizes", "32x32",
        )  # fmt: skip
        try:
            body = {"prompt": "a fox", "size": "32x32", "num_frames": 17, "num_inference_steps": 1}
            filler = fill(disk, 8192)
            with live.http() as http:
                rejected = http.post("/v1/videos", json=body)
                assert rejected.status_code == 503, rejected.text
                assert rejected.json()["error"]["code"] == "storage"
                assert "disk" in rejected.json()["error"]["message"]
                filler.unlink()
                accepted = http.post("/v1/videos", json=body)
            assert accepted.status_code == 200, accepted.text
            assert live.openai().videos.poll(accepted.json()["id"], poll_interval_ms=200).status == "completed"
        finally:
            status = live.end()
        assert status == 0
