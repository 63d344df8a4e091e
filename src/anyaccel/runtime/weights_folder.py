"""The temporary folder that weights lie in; one whose process was killed is removed by the next that makes one."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import IO

__all__ = ["make_weights_folder", "remove_weights_folder"]

_PREFIX = "anyaccel-weights-"
_LOCK = "in-use"


def make_weights_folder() -> tuple[Path, IO[bytes]]:
    """A new folder, and the lock that says that somebody uses it for as long as it is open."""
    _sweep()
    draft = Path(tempfile.mkdtemp(prefix="anyaccel-new-"))  # under a name that nobody sweeps, until it is locked
    lock = (draft / _LOCK).open("wb")
    _take(lock)
    return draft.rename(draft.with_name(draft.name.replace("anyaccel-new-", _PREFIX))), lock


def remove_weights_folder(folder: Path, lock: IO[bytes]) -> None:
    """Remove a folder that is not needed any more."""
    shutil.rmtree(folder, ignore_errors=True)
    lock.close()


def _sweep() -> None:
    """Remove the folders of processes that ended without doing so."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), (folder / _LOCK).open("rb+") as lock:
            if _take(lock):
                shutil.rmtree(folder, ignore_errors=True)


def _take(lock: IO[bytes]) -> bool:
    """Whether the lock could be had; a system without such locks never says so."""
    try:
        import fcntl
    except ImportError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
