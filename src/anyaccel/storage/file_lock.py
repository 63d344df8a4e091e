"""File locks that the operating system releases when the process exits."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import IO

from anyaccel.errors import UsageError

# Windows has no fcntl. There, every attempt to lock a file succeeds.
if sys.platform != "win32":
    import fcntl

__all__ = ["lock_file", "try_lock_file"]


def try_lock_file(path: Path) -> IO[bytes] | None:
    """Lock a file until the returned handle is closed, or return None if it is already locked.

    The file is created if necessary.
    """
    file = path.open("ab")  # append mode: opening must not truncate the file of the lock's owner
    if sys.platform != "win32":
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        except OSError:  # the file system has no locks
            file.close()
            raise
    return file


def lock_file(path: Path, message: str, hint: str) -> IO[bytes]:
    """Lock a file until the returned handle is closed; raise `UsageError` if it is already locked.

    `message` and `hint` are the texts of that error.
    """
    try:
        file = try_lock_file(path)
    except OSError as error:
        raise UsageError(
            f"cannot lock {path}: {error.strerror or error}", hint="use a folder on a local disk"
        ) from error
    if file is None:
        raise UsageError(message, hint=hint)
    return file
