"""`anyaccel cache` and `anyaccel warm`: what is said, what is refused, and a first picture that starts warm."""

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from anyaccel.backends.registry import load_registry
from anyaccel.cli.main import app
from anyaccel.errors import AnyaccelError, UsageError
from anyaccel.recipes import recipes
from anyaccel.runtime.speed.compile_cache import find_path, save_payload
from anyaccel.runtime.speed.compile_cache_key import find_versions


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


def test_an_entry_that_cannot_be_read_is_listed_and_stops_nothing(own_cache: Path) -> None:
    save_payload({**KEY, **find_versions()}, b"graphs", 23.0)
    save_payload({**KEY, **find_versions(), "shape": "x"}, b"12345", 23.0)
    path = find_path({**KEY, **find_versions(), "shape": "x"})
    assert path.parent == own_cache / "cache" / "compiled"
    path.write_bytes(path.read_bytes().replace(b'"took_s": 23.0', b'"took_s": 1e300'))
    listed = call("cache", "list")
    assert f"{path.name[:12]}  what it is for cannot be read" in listed
    assert "FluxPipeline, 512" in listed
    assert "2 kept" in listed
    assert "1 of them damaged" in listed
    rows = json.loads(call("cache", "list", "--json"))["entries"]
    assert {row["state"] for row in rows} == {"ready", "damaged"}
    assert "1 entry in" in call("cache", "export", str(own_cache / "sound.tar.gz"))
    assert "1 removed" in call("cache", "prune")
    assert "1 kept" in call("cache", "list")


def test_an_import_of_which_nothing_is_here_afterwards_fails(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_payload({**KEY, **find_versions()}, b"graphs", 23.0)
    file, wrong = own_cache / "graphs.tar.gz", own_cache / "wrong.tar.gz"
    call("cache", "export", str(file))
    assert "0 entries taken in, 1 here already" in call("cache", "import", str(file))
    with tarfile.open(wrong, "w:gz") as archive:
        member = tarfile.TarInfo("a" * 32 + ".compiled")
        archive.addfile(member, io.BytesIO(b""))
    with pytest.raises(UsageError, match=r"nothing of .* was taken in"):
        call("cache", "import", str(wrong))
    (own_cache / "file").write_text("")
    monkeypatch.setenv("ANYACCEL_CACHE", str(own_cache / "file"))
    with pytest.raises(UsageError, match="file is not a folder\nhint: set ANYACCEL_CACHE"):
        call("cache", "import", str(file))


def test_pruning_says_what_it_leaves_alone_and_all_is_also_what_compilers_keep(own_cache: Path) -> None:
    save_payload({**KEY, **find_versions()}, b"graphs", 23.0)
    (own_cache / "cache" / "compiled" / "README.txt").write_text("mine")
    graphs = own_cache / "cache" / "graphs" / load_registry().names()[0]
    graphs.mkdir(parents=True)
    (graphs / "kernel").write_bytes(b"x" * 2048)
    assert "2 KiB that compilers keep themselves" in call("cache", "list")
    for words, removed in ((["prune"], "0 removed"), (["prune", "--all"], "1 removed")):
        assert graphs.is_dir()
        pruned = call("cache", *words)
        assert removed in pruned
        assert "left alone, since anyaccel did not write it" in pruned
        assert "README.txt" in pruned
    assert "2 KiB" in pruned
    assert not graphs.exists()
    assert (own_cache / "cache" / "compiled" / "README.txt").is_file()


def test_a_folder_is_no_file_to_export_into(own_cache: Path) -> None:
    save_payload({**KEY, **find_versions()}, b"graphs", 23.0)
    with pytest.raises(UsageError, match="is a folder\nhint: name the file"):
        call("cache", "export", str(own_cache))


def test_warming_into_a_folder_that_cannot_be_written_is_refused_before_anything_is_loaded(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own_cache / "file").write_text("")
    monkeypatch.setenv("ANYACCEL_CACHE", str(own_cache / "file" / "below"))
    with pytest.raises(UsageError, match="file is not a folder\nhint: set ANYACCEL_CACHE"):
        call("warm", "./no-such-model", "--size", "64x64")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["warm", "embedded", "--size", "1000000x1000000"], "width must be an integer from 1 to 16384"),
        (["warm", "embedded", "--size", "64x1000000"], "height must be an integer from 1 to 16384"),
        (["cache", "export", "x.tar.gz"], "nothing is kept"),
        (["cache", "import", "no-such-file"], "there is no file"),
        (["cache", "prune", "--older", "-3"], "days from 0 up"),
        (["cache", "prune", "--older", "nan"], "days from 0 up"),
        (["warm", "embedded", "--size", "0x0"], "width must be an integer"),
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
@pytest.mark.needs_tool("compiler")
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


@pytest.mark.slow
def test_what_a_compiler_does_not_hand_out_is_not_said_to_be_kept(own_cache: Path) -> None:
    pipe: Any = recipes()["stable-diffusion"].make()
    pipe.save_pretrained(own_cache / "model")
    words = ["warm", str(own_cache / "model"), "--size", "16x16", "--device", "virtual:neuron"]
    environment = {**os.environ, "ANYACCEL_CACHE": str(own_cache / "cache")}
    command = [sys.executable, "-m", "anyaccel", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "0 new, 0 kept before, 1 that cannot be kept" in done.stdout
