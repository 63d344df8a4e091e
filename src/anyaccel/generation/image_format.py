"""Image files with the generation metadata, which `anyaccel.media` embeds and reads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from anyaccel.errors import UsageError
from anyaccel.generation.metadata import MediaMetadata, describe_metadata, read_document, write_document
from anyaccel.media.formats import SUFFIXES as MEDIA_SUFFIXES

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["SUFFIXES", "encode_image", "read_metadata"]

SUFFIXES = tuple(item.suffix for item in MEDIA_SUFFIXES.values() if "image" in item.kinds)
"""Suffixes of image files."""

_QUALITY = 95


def encode_image(image: Image.Image, suffix: str, metadata: Sequence[MediaMetadata], quality: int = _QUALITY) -> bytes:
    """Return the bytes of an image file that includes the metadata of one or more images.

    `suffix` selects the format. A contact sheet includes the metadata of several images. The output is
    deterministic. `quality`, from 0 to 100, applies to JPEG and WebP; PNG is lossless.
    """
    from anyaccel.media.encode import encode

    return encode(
        image,
        suffix,
        document=write_document(metadata),
        comment="\n\n".join(describe_metadata(item) for item in metadata),
        quality=quality,
        software=f"anyaccel {metadata[0].versions.get('anyaccel', '')}".rstrip(),
    )


def read_metadata(path: str | os.PathLike[str]) -> tuple[MediaMetadata, ...]:
    """Return the metadata in an image file: one item, or one per image on a contact sheet.

    Raises UsageError if the file contains no valid metadata.
    """
    from anyaccel.media.decode import read_document as read_document_text

    text = read_document_text(Path(path))
    if text is None:
        raise UsageError(
            f"{path} contains no generation metadata",
            hint="use the original file written by anyaccel; image editors and messaging apps often remove the "
            "metadata",
        )
    try:
        return read_document(text)
    except (ValueError, RecursionError) as error:  # deeply nested JSON exceeds the recursion limit
        raise UsageError(
            f"invalid generation metadata in {path}: {error}",
            hint="copy or download the file again, or update anyaccel if a newer version wrote the file",
        ) from error
