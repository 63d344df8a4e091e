"""The formats that pictures are written in, and where each keeps the picture's origin."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyaccel.errors import UsageError
from anyaccel.generation.metadata import ImageMetadata, describe_metadata, read_document, write_document

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["SUFFIXES", "encode_image", "read_metadata"]

SUFFIXES = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
"""What a file's ending makes it."""

_RECORD, _WORDS = "anyaccel", "parameters"
"""The keywords in a PNG; other programs read the second."""
_EXIF_FOLDER, _USER_COMMENT, _COMMENT, _SOFTWARE = 0x8769, 0x9286, 0x9C9C, 0x0131
_ASCII = b"ASCII\0\0\0"
_QUALITY = 95
_LARGEST_FILE = 2**30


def encode_image(image: Image.Image, suffix: str, origins: Sequence[ImageMetadata], quality: int = _QUALITY) -> bytes:
    """The bytes of a picture's file, with the origin of each picture that is on it; the same for the same picture.

    The quality, from 0 to 100, is that of JPEG and WebP; a PNG loses nothing.
    """
    kind = SUFFIXES[suffix.lower()]
    options = _png_options(origins) if kind == "PNG" else {**_exif_options(origins, kind), "quality": quality}
    if kind != "PNG" and image.mode not in ("L", "RGB"):
        image = image.convert("RGB")
    stream = io.BytesIO()
    try:
        image.save(stream, kind, **options)
    except ValueError as error:
        if "too long" not in str(error):
            raise
        raise UsageError(
            f"a {kind} has room for 64 KiB of text, and the record of {len(origins)} pictures needs more",
            hint="write a png",
        ) from error
    return stream.getvalue()


def _software(origins: Sequence[ImageMetadata]) -> str:
    return f"anyaccel {origins[0].versions.get('anyaccel', '')}".rstrip()


def _describe(origins: Sequence[ImageMetadata]) -> str:
    return "\n\n".join(describe_metadata(origin) for origin in origins)


def _png_options(origins: Sequence[ImageMetadata]) -> dict[str, Any]:
    from PIL.PngImagePlugin import PngInfo

    text = PngInfo()
    text.add_text("Software", _software(origins))
    text.add_itxt(_WORDS, _describe(origins))
    text.add_itxt(_RECORD, write_document(origins))
    return {"pnginfo": text}


def _exif_options(origins: Sequence[ImageMetadata], kind: str) -> dict[str, Any]:
    from PIL.Image import Exif

    exif = Exif()
    exif[_SOFTWARE] = _software(origins)
    exif[_COMMENT] = _describe(origins).encode("utf-16-le")  # the one field for words that is not ASCII alone
    exif[_EXIF_FOLDER] = {_USER_COMMENT: _ASCII + write_document(origins).encode("ascii")}
    return {"exif": exif} | ({"subsampling": 0} if kind == "JPEG" else {})


def read_metadata(path: str | os.PathLike[str]) -> tuple[ImageMetadata, ...]:
    """The origins in a picture's file: one, or all that are on a contact sheet."""
    text = _read_record(Path(path))
    if text is None:
        raise UsageError(
            f"{path} does not say how it was made",
            hint="only pictures that anyaccel wrote do, and programs that edit or send pictures often drop it",
        )
    try:
        return read_document(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"what {path} says of how it was made cannot be read: {error}",
            hint="take the file as anyaccel wrote it; a newer anyaccel's pictures need a newer anyaccel",
        ) from error


def _read_record(path: Path) -> str | None:
    """The text of the record, from wherever the format keeps it; None if there is none."""
    from PIL import Image, UnidentifiedImageError

    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise UsageError(f"{path} is larger than any picture", hint="give a picture that anyaccel wrote")
        with Image.open(path, formats=sorted(set(SUFFIXES.values()))) as image:
            if image.format == "PNG":
                record = image.info.get(_RECORD)
            else:
                record = image.getexif().get_ifd(_EXIF_FOLDER).get(_USER_COMMENT)
    except UnidentifiedImageError as error:
        raise UsageError(
            f"{path} is no whole picture in png, jpeg or webp", hint="give one that anyaccel wrote"
        ) from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"{path} cannot be read: {reason}", hint="is the path right?") from error
    except (ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UsageError(f"{path} is a damaged picture: {error}", hint="take the file as anyaccel wrote it") from error
    if isinstance(record, bytes):
        return record.removeprefix(_ASCII).rstrip(b"\0").decode("ascii", "replace") if _ASCII in record[:8] else None
    return str(record) if record is not None else None
