"""Temporary files that are mapped into memory and have no further use."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

__all__ = ["open_file_to_map"]

_PREFIX = "anyaccel-mapped-"
_CAN_REMOVE_MAPPED_FILES = os.name != "nt"


@contextmanager
def open_file_to_map() -> Iterator[IO[bytes]]:
    """Create a temporary file, which must be written and mapped in the `with` block.

    It is removed at the end of the block; the mapping stays valid. Windows cannot remove a mapped file.
    There, it is removed when a process creates the next one.
    """
    if not _CAN_REMOVE_MAPPED_FILES:
        for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
            with suppress(OSError):  # still mapped
                path.unlink()
    with tempfile.NamedTemporaryFile(prefix=_PREFIX, delete=_CAN_REMOVE_MAPPED_FILES) as file:
        yield file
