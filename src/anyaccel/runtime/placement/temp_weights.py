"""The temporary directory of weights that are offloaded to disk.

The directory of a process that was killed is removed by the next process that creates one.
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
    """Create a directory; return it with its lock, which keeps other processes from removing it while it is open."""
    _remove_unlocked()
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        lock = try_lock_file(folder / _LOCK)
        if lock is not None:
            if os.fstat(lock.fileno()).st_nlink:
                return folder, lock
            lock.close()
        # Another process locked and removed the directory before this one locked it.


def remove_weights_folder(folder: Path, lock: IO[bytes]) -> None:
    """Remove a folder that is not needed any more."""
    shutil.rmtree(folder, ignore_errors=True)
    lock.close()


def _remove_unlocked() -> None:
    """Remove the directories of processes that ended without doing so."""
    if not LOCKS_ARE_SUPPORTED:
        return
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        with suppress(OSError):  # another user's, or removed meanwhile
            lock = try_lock_file(path)
            if lock is not None:
                remove_weights_folder(path.parent, lock)
