"""The cache directory: its path, write errors, and stored measurements."""

import json
import logging
from pathlib import Path

import pytest

from anyaccel.storage.cache_dir import (
    find_cache_folder,
    find_graphs_folder,
    find_write_error,
    read_fact,
    store_fact,
    warn_not_cached,
)
from tests.conftest import RunCli, run_in_fork


def test_environment_variable_overrides_the_user_cache_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("ANYACCEL_CACHE", raising=False)
    assert find_cache_folder() == tmp_path / "anyaccel"
    monkeypatch.setenv("ANYACCEL_CACHE", str(tmp_path / "own"))
    assert find_cache_folder() == tmp_path / "own"
    assert find_graphs_folder() == tmp_path / "own" / "graphs"
    monkeypatch.delenv("ANYACCEL_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_cache_folder() == tmp_path / ".cache" / "anyaccel"


def test_measurements_are_stored_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYACCEL_CACHE", str(tmp_path / "cache"))
    assert read_fact("facts.json", "a") is None
    store_fact("facts.json", "a", 1.5)
    store_fact("facts.json", "b", [2])
    assert (read_fact("facts.json", "a"), read_fact("facts.json", "b")) == (1.5, [2])
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["facts.json"]
    for damaged in ("{", "[]"):
        (tmp_path / "cache" / "facts.json").write_text(damaged)
        assert read_fact("facts.json", "a") is None
    store_fact("facts.json", "a", 3)
    assert json.loads((tmp_path / "cache" / "facts.json").read_text()) == {"a": 3}


def test_unwritable_directory_warns_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ANYACCEL_CACHE", str(tmp_path / "file"))
    store_fact("facts.json", "a", 1)
    assert read_fact("facts.json", "a") is None
    assert find_write_error(tmp_path / "new") == ""
    assert (tmp_path / "new").is_dir()
    assert str(tmp_path / "file") in find_write_error(tmp_path / "file" / "below")
    with caplog.at_level(logging.WARNING, "anyaccel"):
        warn_not_cached("the disk is full")
        warn_not_cached("the disk is full")
    assert caplog.text.count("the disk is full") == 1


def test_the_tests_do_not_use_the_cache_of_the_user(run_cli_forked: RunCli) -> None:
    assert find_cache_folder() != Path.home() / ".cache" / "anyaccel"
    done = run_cli_forked("cache", "list", "--json")
    assert str(Path.home() / ".cache" / "anyaccel") not in done.stdout + done.stderr
    folder = run_in_fork(lambda: print(find_cache_folder()), ["python"], {}).stdout.strip()
    assert folder == str(find_cache_folder())
