"""Atomic file writes: readers see either the old or the new content, even after a crash.

The content is written to a temporary file in the same directory, flushed to disk and then renamed.
A process that is killed before the rename leaves its temporary file behind; later writes remove
such files after a day.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from anyaccel.errors import UsageError

__all__ = ["atomic_write", "atomic_writer", "check_output_folder", "is_temporary_file", "remove_temporary_files"]

_TEMPORARY_NAME = re.compile(r"\.anyaccel-[0-9a-f]{16}\.tmp")
_DAY_S = 86400
# Errors of `os.link` on file systems without hard links.
_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


def check_output_folder(path: Path) -> None:
    """Raise `UsageError` if the folder of an output file does not exist or is not writable."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"the folder {folder} does not exist", hint=f"create it with `mkdir -p {folder}`")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"cannot write {path}: the folder is not writable", hint="choose another path")


def atomic_write(path: Path, content: bytes | str, *, overwrite: bool = True, mode: int = 0o666) -> None:
    """Write a file atomically; text is encoded as UTF-8. See `atomic_writer` for the options."""
    with atomic_writer(path, overwrite=overwrite, mode=mode) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def atomic_writer(path: Path, *, overwrite: bool = True, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Open a temporary file, and rename it to `path` at the end of the `with` block.

    If the block raises an exception, the temporary file is removed. A new file is created with `mode`,
    subject to the umask; a replaced file keeps its permissions. With `overwrite=False`,
    `FileExistsError` is raised if `path` exists at the end of the block, so two processes never
    overwrite each other's files.
    """
    _remove_stale_files(path.parent, int(time.time() // _DAY_S))
    temporary = path.with_name(f".anyaccel-{secrets.token_hex(8)}.tmp")
    existing_mode = _read_permissions(path) if overwrite else None
    creation_mode = mode if existing_mode is None else existing_mode
    try:
        with os.fdopen(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, creation_mode), "wb") as file:
            yield file
            file.flush()
            # Before the rename: after a power failure, the new name could otherwise point to an empty file.
            os.fsync(file.fileno())
        if existing_mode is not None:
            temporary.chmod(existing_mode)  # os.open applied the umask, which must not change existing permissions
        if overwrite:
            os.replace(temporary, path)
        else:
            _rename_to_free_name(temporary, path)
        _sync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def is_temporary_file(path: Path) -> bool:
    """Return whether a path has the name of a temporary file created by `atomic_write`."""
    return _TEMPORARY_NAME.fullmatch(path.name) is not None


def remove_temporary_files(directory: Path, *, older_than_s: float = _DAY_S) -> None:
    """Remove temporary files left behind by killed processes.

    Pass `older_than_s=0` only if no other process is writing to the directory.
    """
    cutoff = time.time() - older_than_s
    paths: list[Path] = []
    with suppress(OSError):  # the directory cannot be listed
        paths += filter(is_temporary_file, directory.iterdir())
    for path in paths:
        with suppress(OSError):  # another process removed or renamed it
            if path.lstat().st_mtime <= cutoff:
                path.unlink(missing_ok=True)


@functools.lru_cache(maxsize=256)
def _remove_stale_files(directory: Path, day: int) -> None:
    """Remove temporary files that are more than a day old from a directory.

    This is done at most once per day, because listing a large directory is slow.
    """
    remove_temporary_files(directory)


def _read_permissions(path: Path) -> int | None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return None
    return mode & 0o777 if stat.S_ISREG(mode) else None


def _rename_to_free_name(temporary: Path, path: Path) -> None:
    """Rename a temporary file; raise FileExistsError if the new path exists."""
    try:
        os.link(temporary, path)  # unlike a rename, this fails if the path exists
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        # Without hard links: reserve the name with an empty file, then replace it.
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        try:
            os.replace(temporary, path)
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def _sync_directory(directory: Path) -> None:
    """Flush a rename in a directory to disk; ignore errors, because not every system supports this."""
    with suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
