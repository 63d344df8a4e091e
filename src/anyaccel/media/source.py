"""Untrusted input files: opening them, and recognizing their format by their content."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from anyaccel.errors import UsageError
from anyaccel.media.formats import SUFFIXES
from anyaccel.media.types import Kind

__all__ = ["COPY_AGAIN", "check_kind", "name_source", "open_source", "recognize"]

COPY_AGAIN = "copy or download the file again"
"""Hint of errors for damaged files."""

_HEADER_BYTES = 16
_TITLES: dict[Kind, str] = {"image": "an image", "video": "a video", "audio": "audio"}


def name_source(source: Path | bytes) -> str:
    """Return how error messages name a source."""
    return str(source) if isinstance(source, Path) else "the file"


@contextmanager
def open_source(source: Path | bytes) -> Iterator[tuple[BinaryIO, str | None]]:
    """Open a file; yield it with the suffix of the format that its content has, or None if it has no known format."""
    if isinstance(source, bytes):
        yield io.BytesIO(source), recognize(source[:_HEADER_BYTES])
        return
    try:
        file = source.open("rb")
        header = file.read(_HEADER_BYTES)  # opening a folder succeeds on some systems
        file.seek(0)
    except OSError as error:
        raise UsageError(
            f"cannot read {source}: {error.strerror or error}", hint="check the path and the permissions of the file"
        ) from error
    with file:
        yield file, recognize(header)


def recognize(header: bytes) -> str | None:
    """Return the suffix of the format of a file that starts with these bytes; None for other formats."""
    if header[:4] == b"RIFF":
        return {b"WEBP": ".webp", b"WAVE": ".wav"}.get(header[8:12])
    if header[4:8] == b"ftyp":
        return ".mp4"
    starts = {
        b"\x89PNG\r\n\x1a\n": ".png",
        b"\xff\xd8\xff": ".jpg",
        b"GIF8": ".gif",
        b"\x1a\x45\xdf\xa3": ".webm",
        b"fLaC": ".flac",
    }
    return next((suffix for start, suffix in starts.items() if header.startswith(start)), None)


def check_kind(suffix: str | None, kind: Kind, name: str, also: frozenset[str] = frozenset()) -> str:
    """Return the suffix if its format can contain a kind of media or is in `also`; else raise `UsageError`."""
    suitable = sorted({item.suffix for item in SUFFIXES.values() if kind in item.kinds} | also)
    if suffix is None:
        raise UsageError(
            f"{name} is not a valid file of a supported format",
            hint=f"for {_TITLES[kind]}, use a {', '.join(suitable[:-1])} or {suitable[-1]} file",
        )
    if suffix not in suitable:
        found = " or ".join(sorted(_TITLES[kind] for kind in SUFFIXES[suffix].kinds))
        raise UsageError(
            f"{name} contains {found} ({suffix[1:].upper()}), not {_TITLES[kind]}",
            hint=f"use a {', '.join(suitable[:-1])} or {suitable[-1]} file",
        )
    return suffix
