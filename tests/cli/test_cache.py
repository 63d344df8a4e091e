"""`anyaccel cache` and `anyaccel warm`: output, errors, and a first image that starts warm."""

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


def call(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


KEY = {"pipeline": "FluxPipeline", "shape": "512 × 512, 1 image", "dtype": "bfloat16", "device": "NVIDIA H200"}


def test_list_export_import_and_prune(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "0 entries in" in call("cache", "list")
    save_payload({**KEY, **find_versions()}, b"graphs", 23.0)
    save_payload({**KEY, **find_versions(), "torch": "1.0"}, b"old graphs", 23.0)
    listed = call("cache", "list")
    assert "FluxPipeline, 512 × 512, 1 image, bfloat16" in listed
    assert "ready" in listed
    assert "of other versions" in listed
    rows = json.loads(call("cache", "list", "--json"))["entries"]
    assert {row["state"] for row in rows} == {"ready", "of other versions"}
    file = own_cache / "graphs.tar.gz"
    assert "exported 2 entries to" in call("cache", "export", str(file))
    assert "removed 1 entry" in call("cache", "prune")
    monkeypatch.setenv("ANYACCEL_CACHE", str(own_cache / "elsewhere"))
    assert "imported 2 entries" in call("cache", "import", str(file))
    assert "removed 2 entries" in call("cache", "prune", "--all")


def test_unreadable_entry_is_listed_and_does_not_stop_other_commands(own_cache: Path) -> None:
    save_payload({**KEY, **find_versions()}, b"graphs", 23.0)
    save_payload({**KEY, **find_versions(), "shape": "x"}, b"12345", 23.0)
    path = find_path({**KEY, **find_versions(), "shape": "x"})
    assert path.parent == own_cache / "cache" / "compiled"
    path.write_bytes(path.read_bytes().replace(b'"took_s": 23.0', b'"took_s": 1e300'))
    listed = call("cache", "list")
    assert f"{path.name[:12]}  unreadable entry" in listed
    assert "FluxPipeline, 512" in listed
    assert "2 entries in" in listed
    assert "1 damaged" in listed
    rows = json.loads(call("cache", "list", "--json"))["entries"]
    assert {row["state"] for row in rows} == {"ready", "damaged"}
    assert "exported 1 entry to" in call("cache", "export", str(own_cache / "readable.tar.gz"))
    assert "removed 1 entry" in call("cache", "prune")
    assert "1 entry in" in call("cache", "list")


def test_import_fails_if_no_entry_can_be_used(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_payload({**KEY, **find_versions()}, b"graphs", 23.0)
    file, invalid = own_cache / "graphs.tar.gz", own_cache / "invalid.tar.gz"
    call("cache", "export", str(file))
    assert "imported 0 entries, 1 already cached" in call("cache", "import", str(file))
    with tarfile.open(invalid, "w:gz") as archive:
        member = tarfile.TarInfo("a" * 32 + ".compiled")
        archive.addfile(member, io.BytesIO(b""))
    with pytest.raises(UsageError, match=r"no entry in .* could be imported"):
        call("cache", "import", str(invalid))
    (own_cache / "file").write_text("")
    monkeypatch.setenv("ANYACCEL_CACHE", str(own_cache / "file"))
    with pytest.raises(UsageError, match="file is not a folder\nhint: set ANYACCEL_CACHE"):
        call("cache", "import", str(file))


def test_prune_reports_foreign_files_and_all_includes_compiler_caches(own_cache: Path) -> None:
    save_payload({**KEY, **find_versions()}, b"graphs", 23.0)
    (own_cache / "cache" / "compiled" / "README.txt").write_text("mine")
    graphs = own_cache / "cache" / "graphs" / load_registry().names()[0]
    graphs.mkdir(parents=True)
    (graphs / "kernel").write_bytes(b"x" * 2048)
    assert "2 KiB of compilers' own caches in" in call("cache", "list")
    for arguments, removed in ((["prune"], "removed 0 entries"), (["prune", "--all"], "removed 1 entry")):
        assert graphs.is_dir()
        pruned = call("cache", *arguments)
        assert removed in pruned
        assert "not removed, not written by anyaccel" in pruned
        assert "README.txt" in pruned
    assert "2 KiB" in pruned
    assert not graphs.exists()
    assert (own_cache / "cache" / "compiled" / "README.txt").is_file()


def test_export_to_a_folder_is_rejected(own_cache: Path) -> None:
    save_payload({**KEY, **find_versions()}, b"graphs", 23.0)
    with pytest.raises(UsageError, match="is a folder\nhint: pass a file name"):
        call("cache", "export", str(own_cache))


def test_warm_checks_that_the_cache_is_writable_before_loading(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own_cache / "file").write_text("")
    monkeypatch.setenv("ANYACCEL_CACHE", str(own_cache / "file" / "below"))
    with pytest.raises(UsageError, match="file is not a folder\nhint: set ANYACCEL_CACHE"):
        call("warm", "./no-such-model", "--size", "64x64")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["warm", "embedded", "--size", "1000000x1000000"], "width must be an integer from 1 to 16384"),
        (["warm", "embedded", "--size", "64x1000000"], "height must be an integer from 1 to 16384"),
        (["cache", "export", "x.tar.gz"], "the cache is empty"),
        (["cache", "import", "no-such-file"], "the file no-such-file does not exist"),
        (["cache", "prune", "--older", "-3"], "must be at least 0 days"),
        (["cache", "prune", "--older", "nan"], "must be at least 0 days"),
        (["warm", "embedded", "--size", "0x0"], "width must be an integer"),
        (["warm", "embedded", "-n", "0"], "must be at least 1"),
        (["bench", "--against", "nobody"], "unknown value 'nobody' for --against"),
        (["warm", "embedded", "--expected-images", "0"], "must be at least 1"),
        (["bench", "--images", "0"], "must be at least 1"),
        (["bench", "--rounds", "0"], "must be at least 1"),
    ],
)
def test_invalid_arguments_are_rejected(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message):
        call(*arguments)


def test_bench_rejects_a_missing_model_before_running() -> None:
    with pytest.raises(AnyaccelError, match="hint: "):
        call("bench", "./no-such-model")


@pytest.mark.slow
@pytest.mark.needs_tool("compiler")
def test_second_process_starts_warm(own_cache: Path) -> None:
    pipe: Any = recipes()["flux"].make()
    pipe.save_pretrained(own_cache / "model")
    command = [sys.executable, "-m", "anyaccel", "warm", str(own_cache / "model"), "--size", "16x16", "-d", "cpu"]
    environment = {**os.environ, "ANYACCEL_CACHE": str(own_cache / "cache")}
    seconds = []
    for expected in ("1 compiled", "1 loaded from the cache"):
        completed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert expected in completed.stdout
        seconds.append(float(completed.stdout.split(" ready in ")[1].split(" s")[0]))
    assert seconds[1] < seconds[0] / 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", ["stable-diffusion", "z-image-modular"])
def test_graphs_that_a_compiler_does_not_export_are_reported_as_not_cacheable(name: str, own_cache: Path) -> None:
    pipe: Any = recipes()[name].make()
    pipe.save_pretrained(own_cache / "model", **({"overwrite_modular_index": True} if "modular" in name else {}))
    arguments = ["warm", str(own_cache / "model"), "--size", "16x16", "--device", "virtual:neuron"]
    environment = {**os.environ, "ANYACCEL_CACHE": str(own_cache / "cache")}
    command = [sys.executable, "-m", "anyaccel", *arguments]
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "0 compiled, 0 loaded from the cache, 1 not cacheable" in completed.stdout


def test_clear_requires_a_confirmation_and_keeps_other_files(own_cache: Path) -> None:
    from anyaccel.planning.memory import MemoryRule
    from anyaccel.runtime.placement.oom_history import load_outcome, save_outcome
    from anyaccel.storage.cache_dir import read_fact, store_fact

    cache = own_cache / "cache"
    save_payload({**KEY, **find_versions()}, b"graphs", 23.0)
    save_outcome("a model", MemoryRule("component"), 1000)
    store_fact("half_precision.json", "this CPU", {"bfloat16": 2.0})
    for name in ("serve", "memory", "compiled"):
        (cache / name).mkdir(exist_ok=True)
        (cache / name / "other.json").write_text("{}")
    with pytest.raises(UsageError, match="only after a confirmation") as caught:
        call("cache", "clear")
    assert "--yes" in caught.value.hint
    assert load_outcome("a model", 1000) == MemoryRule("component")
    output = call("cache", "clear", "--yes")
    assert "removed 1 entry" in output
    assert "removed 2 files with measurements" in output
    assert "0 entries" in call("cache", "list")
    assert load_outcome("a model", 1000) is None
    assert read_fact("half_precision.json", "this CPU") is None
    assert all((cache / name / "other.json").exists() for name in ("serve", "memory", "compiled"))
    assert "removed 0 entries" in call("cache", "clear", "-y")
