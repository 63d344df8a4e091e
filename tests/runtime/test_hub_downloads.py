"""Downloads from the Hub, from a local server: resumed, with one progress bar, and with errors that name the file."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anyaccel.recipes import recipes
from tests.conftest import NEEDS_RECIPES
from tests.runtime.fake_hub import REPOSITORY, FakeHub, serving

pytestmark = [NEEDS_RECIPES, pytest.mark.long]

WEIGHTS = "unet/diffusion_pytorch_model.safetensors"
# The library writes downloads in chunks of 10 MB. A download can only continue after a whole chunk.
CHUNK = 4096
PROGRAM = f"""
import json
import huggingface_hub.constants
huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE = {CHUNK}
import anyaccel
from anyaccel.errors import AnyaccelError
try:
    pipe = anyaccel.DiffusionPipeline.from_pretrained({REPOSITORY!r}, device="cpu")
    print(json.dumps({{"total": float(pipe.unet.conv_in.weight.detach().abs().sum())}}))
except AnyaccelError as error:
    print(json.dumps({{"error": type(error).__name__, "message": error.message, "hint": error.hint}}))
"""


@pytest.fixture(scope="module")
def pipe() -> Any:
    return recipes()["stable-diffusion"].make()


@pytest.fixture
def hub(pipe: Any, tmp_path: Path) -> Iterator[FakeHub]:
    pipe.save_pretrained(tmp_path / "repository")
    with serving(tmp_path / "repository") as hub:
        yield hub


def load(hub: FakeHub, tmp_path: Path) -> tuple[dict[str, Any], str]:
    """Load the repository in a process; return its answer and what it wrote to stderr."""
    variables = {
        "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1", "HF_HUB_DOWNLOAD_TIMEOUT": "5",
        "TQDM_POSITION": "-1",  # huggingface_hub shows bars although stderr is not a terminal
    }  # fmt: skip
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer, done.stderr


def test_an_interrupted_file_continues_in_the_same_run(hub: FakeHub, pipe: Any, tmp_path: Path) -> None:
    hub.cut[WEIGHTS] = 10 * CHUNK + 100
    answer, _ = load(hub, tmp_path)
    assert answer["total"] == pytest.approx(float(pipe.unet.conv_in.weight.detach().abs().sum()))
    assert [position for name, position in hub.downloads if name == WEIGHTS] == [0, 10 * CHUNK]
    names = hub.read_downloads()
    assert len(names) == len(set(names)) + 1
    assert "total" in load(hub, tmp_path)[0]
    assert hub.read_downloads() == []


def test_the_next_run_downloads_only_missing_files(hub: FakeHub, tmp_path: Path) -> None:
    hub.status[WEIGHTS] = 500
    answer, _ = load(hub, tmp_path)
    assert answer["error"] == "ModelFileError"
    assert f"cannot download {WEIGHTS} of {REPOSITORY}" in answer["message"]
    assert "load the model again" in answer["hint"]
    complete = set(hub.read_downloads())
    hub.status.clear()
    assert "total" in load(hub, tmp_path)[0]
    assert WEIGHTS not in complete
    downloaded = hub.read_downloads()
    assert WEIGHTS in downloaded
    assert complete.isdisjoint(downloaded)


def test_gated_repository(hub: FakeHub, tmp_path: Path) -> None:
    hub.status["model_index.json"] = 403
    answer, _ = load(hub, tmp_path)
    assert f"cannot download model_index.json of {REPOSITORY}" in answer["message"]
    assert "hf auth login" in answer["hint"]


def test_one_progress_bar(hub: FakeHub, tmp_path: Path) -> None:
    _, output = load(hub, tmp_path)
    assert "Downloading: 100%" in output
    for other in ("Fetching", "Reconstruct", "Downloading bytes"):
        assert other not in output
