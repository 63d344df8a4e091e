"""Temporary directories for weights that are offloaded to disk.

A directory left by a killed process is removed by the next process that creates one.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO

from anyaccel.storage.file_lock import LOCKS_ARE_SUPPORTED, try_lock_file

__all__ = ["make_weights_folder", "remove_weights_folder"]

_PREFIX = "anyaccel-weights-"
_LOCK = "in-use"


def make_weights_folder() -> tuple[Path, IO[bytes]]:
    """Create a temporary directory for weights; return it with its open lock file.

    The lock prevents other processes from removing the directory.
    """
    _remove_unlocked()
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        lock = try_lock_file(folder / _LOCK)
        if lock is not None:
            # No link left: another process removed the directory between mkdtemp and the lock.
            if os.fstat(lock.fileno()).st_nlink:
                return folder, lock
            lock.close()


def remove_weights_folder(folder: Path, lock: IO[bytes]) -> None:
    """Remove a temporary weights directory and release its lock."""
    # In this order: after the release another process could remove the same directory concurrently.
    shutil.rmtree(folder, ignore_errors=True)
    lock.close()


def _remove_unlocked() -> None:
    """Remove the weights directories left by processes that were killed."""
    if not LOCKS_ARE_SUPPORTED:
        return
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        with suppress(OSError):  # owned by another user, or already removed
            lock = try_lock_file(path)
            if lock is not None:
                remove_weights_folder(path.parent, lock)
