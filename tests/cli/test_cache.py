"""`anyaccel cache` and `anyaccel warm`: what is said, what is refused, and a first picture that starts warm."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from anyaccel.cli.main import app
from anyaccel.errors import AnyaccelError, UsageError
from anyaccel.recipes import recipes
from anyaccel.runtime.artefact_key import find_versions
from anyaccel.runtime.artefacts import save_payload


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("ANYACCEL_CACHE", str(tmp_path / "cache"))
    return tmp_path


def call(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


KEY = {"pipeline": "FluxPipeline", "shape": "512 × 512, 1 image", "dtype": "bfloat16", "device": "NVIDIA H200"}


def test_a_cache_is_listed_exported_imported_and_pruned(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "0 kept" in call("cache", "list")
    save_payload({**KEY, **find_versions()}, b"graphs", 23.0)
    save_payload({**KEY, **find_versions(), "torch": "1.0"}, b"old graphs", 23.0)
    listed = call("cache", "list")
    assert "FluxPipeline, 512 × 512, 1 image, bfloat16" in listed
    assert "ready" in listed
    assert "of other versions" in listed
    rows = json.loads(call("cache", "list", "--json"))["entries"]
    assert {row["state"] for row in rows} == {"ready", "of other versions"}
    file = own_cache / "graphs.tar.gz"
    assert "2 entries" in call("cache", "export", str(file))
    assert "1 removed" in call("cache", "prune")
    monkeypatch.setenv("ANYACCEL_CACHE", str(own_cache / "elsewhere"))
    assert "2 entries taken in" in call("cache", "import", str(file))
    assert "2 removed" in call("cache", "prune", "--all")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["cache", "export", "x.tar.gz"], "nothing is kept"),
        (["cache", "import", "no-such-file"], "there is no file"),
        (["cache", "prune", "--older", "-3"], "days from 0 up"),
        (["warm", "embedded", "--size", "0x0"], "size"),
        (["warm", "embedded", "-n", "0"], "from 1 up"),
        (["bench", "--against", "nobody"], "--against is one of"),
        (["bench", "--rounds", "0"], "from 1 up"),
    ],
)
def test_wrong_words(words: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=expected):
        call(*words)


def test_a_model_that_is_not_there_is_refused_before_anything_runs() -> None:
    with pytest.raises(AnyaccelError, match="hint: "):
        call("bench", "./no-such-model")


@pytest.mark.slow
def test_a_second_process_starts_warm(own_cache: Path) -> None:
    pipe: Any = recipes()["flux"].make()
    pipe.save_pretrained(own_cache / "model")
    command = [sys.executable, "-m", "anyaccel", "warm", str(own_cache / "model"), "--size", "16x16", "-d", "cpu"]
    environment = {**os.environ, "ANYACCEL_CACHE": str(own_cache / "cache")}
    seconds = []
    for expected in ("1 new", "1 kept before"):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert expected in done.stdout
        seconds.append(float(done.stdout.split(" ready in ")[1].split(" s")[0]))
    assert seconds[1] < seconds[0] / 2
