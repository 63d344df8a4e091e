"""Atomic file writes: crashes, races between processes, permissions and temporary files."""

import multiprocessing
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from anyaccel.storage.atomic_write import atomic_write, atomic_writer, is_temporary_file, remove_temporary_files

SPAWN = multiprocessing.get_context("spawn")
DAY_S = 86400


def list_names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def run_killed(code: str, path: Path) -> None:
    """Run code in a process that kills itself."""
    preamble = "import os, signal, sys, pathlib; from anyaccel.storage.atomic_write import *; "
    preamble += "path = pathlib.Path(sys.argv[1]); kill = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
    done = subprocess.run([sys.executable, "-c", preamble + code, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL


def test_bytes_and_text_replace_the_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    atomic_write(path, b"\x00\r\n")
    assert path.read_bytes() == b"\x00\r\n"
    atomic_write(path, "é\n")
    assert path.read_bytes() == "é\n".encode()
    with atomic_writer(path) as file:
        file.write(b"one ")
        assert path.read_bytes() == "é\n".encode()
        file.write(b"two")
    assert path.read_bytes() == b"one two"
    assert list_names(tmp_path) == ["file"]


def test_relative_path_and_long_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = "n" * 255
    atomic_write(Path(name), b"x")
    assert list_names(tmp_path) == [name]


def test_content_and_directory_are_flushed_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(descriptor: int) -> None:
        events.append("directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def note_replace(source: Path, target: Path) -> None:
        assert Path(source).read_bytes() == b"content"
        events.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    atomic_write(tmp_path / "file", b"content")
    assert events == ["file", "replace", "directory"]


@pytest.mark.parametrize("error", [OSError, ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("overwrite", [True, False])
def test_failure_keeps_the_old_content_and_leaves_no_temporary_file(
    tmp_path: Path, error: type[BaseException], overwrite: bool
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write() -> None:
        with atomic_writer(path, overwrite=overwrite) as file:
            file.write(b"new")
            raise error

    with pytest.raises(error):
        write()
    assert path.read_bytes() == b"old"
    assert list_names(tmp_path) == ["file"]


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_interrupt_while_flushing_or_renaming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / "file").write_bytes(b"old")
    monkeypatch.setattr(os, function, interrupt)
    with pytest.raises(KeyboardInterrupt):
        atomic_write(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert list_names(tmp_path) == ["file"]


def test_interrupt_without_hard_links_leaves_no_empty_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reject(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")  # FAT file systems have no hard links

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "link", reject)
    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        atomic_write(tmp_path / "file", b"new", overwrite=False)
    assert list_names(tmp_path) == []


def test_existing_name_is_an_error_without_overwrite(tmp_path: Path) -> None:
    atomic_write(tmp_path / "file", b"first", overwrite=False)
    with pytest.raises(FileExistsError):
        atomic_write(tmp_path / "file", b"second", overwrite=False)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError):
        atomic_write(tmp_path / "link", b"second", overwrite=False)
    assert (tmp_path / "file").read_bytes() == b"first"
    assert list_names(tmp_path) == ["file", "link"]


def test_permissions_follow_the_umask_and_the_replaced_file(tmp_path: Path) -> None:
    def write(name: str, *, overwrite: bool = True, mode: int = 0o666) -> int:
        atomic_write(tmp_path / name, b"x", overwrite=overwrite, mode=mode)
        return stat.S_IMODE((tmp_path / name).stat().st_mode)

    before = os.umask(0o027)
    try:
        assert write("new") == 0o640
        assert write("new free", overwrite=False) == 0o640
        assert write("secret", mode=0o600) == 0o600
        assert write("secret") == 0o600, "a private file stays private"
        (tmp_path / "new").chmod(0o664)
        assert write("new") == 0o664
    finally:
        os.umask(before)


def test_private_file_is_private_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch(mode=0o600)
    with atomic_writer(path):
        [temporary] = [entry for entry in tmp_path.iterdir() if is_temporary_file(entry)]
        assert stat.S_IMODE(temporary.stat().st_mode) == 0o600


def _write_often(path: Path, letter: bytes, barrier: Barrier) -> None:
    barrier.wait(60)
    for _ in range(200):
        atomic_write(path, letter * 50_000)


def test_readers_see_complete_content_while_two_processes_write(tmp_path: Path) -> None:
    path = tmp_path / "file"
    atomic_write(path, b"a" * 50_000)
    barrier = SPAWN.Barrier(3)
    writers = [SPAWN.Process(target=_write_often, args=(path, letter, barrier)) for letter in (b"a", b"b")]
    for writer in writers:
        writer.start()
    barrier.wait(60)
    contents = set()
    while any(writer.is_alive() for writer in writers):
        contents.add(path.read_bytes())
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert contents <= {b"a" * 50_000, b"b" * 50_000}
    assert list_names(tmp_path) == ["file"]


def _write_once(path: Path, content: bytes, barrier: Barrier) -> None:
    barrier.wait(60)
    try:
        atomic_write(path, content, overwrite=False)
    except FileExistsError:
        sys.exit(7)


def test_only_one_of_many_processes_creates_the_file(tmp_path: Path) -> None:
    barrier = SPAWN.Barrier(4)
    contents = [bytes([number]) * 10_000 for number in range(4)]
    writers = [SPAWN.Process(target=_write_once, args=(tmp_path / "file", content, barrier)) for content in contents]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    codes = [writer.exitcode for writer in writers]
    assert sorted(map(str, codes)) == ["0", "7", "7", "7"]
    assert (tmp_path / "file").read_bytes() == contents[codes.index(0)]
    assert list_names(tmp_path) == ["file"]


@pytest.mark.parametrize(
    "code",
    [
        "os.replace = kill; atomic_write(path, b'new' * 10_000)",
        "os.fsync = kill; atomic_write(path, b'new' * 10_000)",
        "with atomic_writer(path) as file: file.write(b'new' * 10_000); file.flush(); kill()",
        "os.link = kill; atomic_write(path.with_name('other'), b'new', overwrite=False)",
    ],
    ids=["before the rename", "before the flush", "while writing", "before the link"],
)
def test_kill_keeps_the_old_content_and_the_temporary_file_is_removed_a_day_later(tmp_path: Path, code: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    run_killed(code, path)
    assert path.read_bytes() == b"old"
    [left] = [entry for entry in tmp_path.iterdir() if entry != path]
    assert is_temporary_file(left)
    code = "import sys, pathlib; from anyaccel.storage.atomic_write import *; "
    write = [sys.executable, "-c", code + "atomic_write(pathlib.Path(sys.argv[1]), b'next')", str(path)]
    subprocess.run(write, check=True)
    assert left.exists(), "its writer may still be running"
    age(left, DAY_S + 60)
    subprocess.run(write, check=True)
    assert list_names(tmp_path) == ["file"]
    assert path.read_bytes() == b"next"


def age(path: Path, seconds: float) -> None:
    modified = path.stat().st_mtime - seconds
    os.utime(path, (modified, modified))


@pytest.mark.parametrize(
    "write", [lambda path: atomic_write(path, b"x"), lambda path: remove_temporary_files(path.parent)]
)
def test_only_own_stale_files_are_removed(tmp_path: Path, write: Callable[[Path], None]) -> None:
    names = [".anyaccel-0123456789abcdef.tmp", ".anyaccel-mine.tmp", "anyaccel-0123456789abcdef.tmp", ".other.tmp"]
    for name in names:
        (tmp_path / name).touch()
        age(tmp_path / name, DAY_S + 60)
    (tmp_path / ".anyaccel-aaaaaaaaaaaaaaaa.tmp").touch()
    write(tmp_path / "file")
    assert set(list_names(tmp_path)) - {"file"} == {*names[1:], ".anyaccel-aaaaaaaaaaaaaaaa.tmp"}
    remove_temporary_files(tmp_path, older_than_s=0)
    assert set(list_names(tmp_path)) - {"file"} == set(names[1:])
    remove_temporary_files(tmp_path / "no such directory")


def test_vanishing_file_does_not_stop_the_removal_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        (tmp_path / f".anyaccel-{number:016x}.tmp").touch()
    lstat, vanished = Path.lstat, list[Path]()

    def vanish(path: Path) -> os.stat_result:
        if not vanished:
            vanished.append(path)
            path.unlink()
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", vanish)
    remove_temporary_files(tmp_path, older_than_s=0)
    assert vanished
    assert list_names(tmp_path) == []


def test_missing_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        atomic_write(tmp_path / "missing" / "file", b"x")
