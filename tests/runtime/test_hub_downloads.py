"""Downloads from the Hub, from a local server: resumed, with one progress bar, and with errors that name the file."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
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
import json, os, sys
import huggingface_hub.constants
huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE = {CHUNK}
import diffusers, transformers
import anyaccel
from anyaccel.errors import AnyaccelError

def load(cache):
    try:
        pipe = anyaccel.DiffusionPipeline.from_pretrained({REPOSITORY!r}, device="cpu", cache_dir=cache)
        return {{"total": float(pipe.unet.conv_in.weight.detach().abs().sum())}}
    except AnyaccelError as error:
        return {{"error": type(error).__name__, "message": error.message, "hint": error.hint}}

diffusers.StableDiffusionPipeline, transformers.CLIPTextModel
for line in sys.stdin:
    cache, answer, messages = json.loads(line)
    if os.fork() == 0:
        os.dup2(os.open(messages, os.O_WRONLY | os.O_CREAT), 2)
        with open(answer, "w") as file:
            json.dump(load(cache), file)
        sys.exit()  # the end of the process closes the progress bars
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""
Load = Callable[[], tuple[dict[str, Any], str]]


@pytest.fixture(scope="module")
def pipe() -> Any:
    return recipes()["stable-diffusion"].make()


@pytest.fixture(scope="module")
def server(pipe: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    folder = tmp_path_factory.mktemp("repository")
    pipe.save_pretrained(folder)
    with serving(folder) as hub:
        yield hub


@pytest.fixture
def hub(server: FakeHub) -> FakeHub:
    for record in (server.cut, server.status, server.downloads):
        record.clear()
    return server


@pytest.fixture(scope="module")
def loader(server: FakeHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator["subprocess.Popen[str]"]:
    """A process that has imported the libraries, and forks a process for each load."""
    variables = {
        "HF_ENDPOINT": server.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DOWNLOAD_TIMEOUT": "5",
        "TQDM_POSITION": "-1",  # huggingface_hub shows bars although stderr is not a terminal
    }  # fmt: skip
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    environment, pipe = {**os.environ, **variables, "HF_HOME": str(tmp_path_factory.mktemp("home"))}, subprocess.PIPE
    with subprocess.Popen(command, env=environment, text=True, stdin=pipe, stdout=pipe) as process:
        yield process


@pytest.fixture
def load(loader: "subprocess.Popen[str]", tmp_path: Path) -> Load:
    """Load the repository in a new process with a cache of this test; return its answer and what it wrote to stderr."""

    def run() -> tuple[dict[str, Any], str]:
        cache, answer, messages = (tmp_path / name for name in ("cache", "answer.json", "messages.txt"))
        messages.unlink(missing_ok=True)
        assert loader.stdin is not None
        assert loader.stdout is not None
        loader.stdin.write(f"{json.dumps([str(path) for path in (cache, answer, messages)])}\n")
        loader.stdin.flush()
        assert loader.stdout.readline() == "0\n", messages.read_text()
        return json.loads(answer.read_text()), messages.read_text()

    return run


def test_an_interrupted_file_continues_in_the_same_run(hub: FakeHub, pipe: Any, load: Load) -> None:
    hub.cut[WEIGHTS] = 10 * CHUNK + 100
    answer, _ = load()
    assert answer["total"] == pytest.approx(float(pipe.unet.conv_in.weight.detach().abs().sum()))
    assert [position for name, position in hub.downloads if name == WEIGHTS] == [0, 10 * CHUNK]
    names = hub.read_downloads()
    assert len(names) == len(set(names)) + 1
    assert "total" in load()[0]
    assert hub.read_downloads() == []


def test_the_next_run_downloads_only_missing_files(hub: FakeHub, load: Load) -> None:
    hub.status[WEIGHTS] = 500
    answer, _ = load()
    assert answer["error"] == "ModelFileError"
    assert f"cannot download {WEIGHTS} of {REPOSITORY}" in answer["message"]
    assert "load the model again" in answer["hint"]
    complete = set(hub.read_downloads())
    hub.status.clear()
    assert "total" in load()[0]
    assert WEIGHTS not in complete
    downloaded = hub.read_downloads()
    assert WEIGHTS in downloaded
    assert complete.isdisjoint(downloaded)


def test_gated_repository(hub: FakeHub, load: Load) -> None:
    hub.status["model_index.json"] = 403
    answer, _ = load()
    assert f"cannot download model_index.json of {REPOSITORY}" in answer["message"]
    assert "hf auth login" in answer["hint"]


def test_one_progress_bar(hub: FakeHub, load: Load) -> None:
    _, output = load()
    assert "Downloading: 100%" in output
    for other in ("Fetching", "Reconstruct", "Downloading bytes"):
        assert other not in output
