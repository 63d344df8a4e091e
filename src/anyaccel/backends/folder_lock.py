"""A folder that one process at a time writes to."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from anyaccel.errors import UsageError

__all__ = ["claim_folder"]


def claim_folder(folder: Path, name: str, words: str, hint: str) -> IO[bytes]:
    """A file that this process holds for as long as it lives, or until it is closed; raises if another one does."""
    held = (folder / name).open("ab")
    try:
        import fcntl

        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # a system without such locks
        return held
    except OSError as error:
        held.close()
        raise UsageError(words, hint=hint) from error
    return held
