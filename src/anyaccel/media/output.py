"""Writing encoded media to disk: the files, separate files with metadata, and the check of the free space."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from anyaccel.errors import UsageError
from anyaccel.media.formats import find_format
from anyaccel.storage.atomic_write import atomic_write
from anyaccel.units import readable

__all__ = ["check_free_space", "find_sidecar", "write_media"]


def find_sidecar(path: Path) -> Path:
    """Return the path of the file with the metadata of a format that cannot contain it: `sound.wav.json`."""
    return path.with_name(f"{path.name}.json")


def write_media(path: Path, content: bytes, document: str | None = None, *, overwrite: bool = True) -> None:
    """Write the bytes that `encode` returned to a file atomically.

    If the format cannot contain the metadata document, it is written to a separate file: see `find_sidecar`. With
    `overwrite=False`, `FileExistsError` is raised if one of the files exists.
    """
    sidecar = find_sidecar(path)
    needs_sidecar = document is not None and not find_format(path.suffix).embeds_metadata
    if needs_sidecar and not overwrite and sidecar.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(sidecar))
    atomic_write(path, content, overwrite=overwrite)
    if needs_sidecar and document is not None:
        atomic_write(sidecar, document)


def check_free_space(folder: Path, needed_bytes: int) -> None:
    """Raise `UsageError` if the disk of a folder has less free space than needed. The folder need not exist yet."""
    absolute = folder.absolute()
    existing = next(path for path in (absolute, *absolute.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        raise UsageError(
            f"the output in {folder} needs up to {readable(needed_bytes)}, but the disk has only {readable(free)} of "
            "free space",
            hint="free disk space, or choose a folder on another disk",
        )
