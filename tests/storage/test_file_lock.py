"""File locks: one process holds a lock, and its exit releases it."""

import errno
import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from anyaccel.errors import UsageError
from anyaccel.storage.file_lock import lock_file, try_lock_file

HOLD = """
import sys, pathlib
from anyaccel.storage.file_lock import try_lock_file
lock = try_lock_file(pathlib.Path(sys.argv[1]))
print(lock is not None, flush=True)
sys.stdin.read()
"""


def test_lock_of_another_process_holds_until_it_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        assert try_lock_file(path) is None
        with pytest.raises(UsageError, match="it is in use\nhint: wait"):
            lock_file(path, "it is in use", hint="wait")
        holder.kill()
        holder.wait()
    with lock_file(path, "it is in use", hint="wait"):
        assert try_lock_file(path) is None
    lock = try_lock_file(path)
    assert lock is not None
    lock.close()


def test_file_system_without_locks_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reject(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", reject)
    with pytest.raises(UsageError, match=r"cannot lock .*lock: No locks available"):
        lock_file(tmp_path / "lock", "it is in use", hint="wait")
