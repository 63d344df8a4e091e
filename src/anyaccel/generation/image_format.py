"""Image file formats, with the generation metadata stored in PNG text chunks or EXIF."""

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

# Pillow's format for each file suffix.
SUFFIXES = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}

# Keywords of the PNG text chunks. Other tools, such as stable-diffusion-webui, read `parameters`.
_DOCUMENT_KEY, _PARAMETERS_KEY = "anyaccel", "parameters"
# Tag numbers of EXIF.
_EXIF_IFD, _USER_COMMENT, _XP_COMMENT, _SOFTWARE = 0x8769, 0x9286, 0x9C9C, 0x0131
# Character code that the EXIF standard requires at the start of a UserComment.
_ASCII = b"ASCII\0\0\0"
_QUALITY = 95
_MAX_FILE_BYTES = 2**30


def encode_image(image: Image.Image, suffix: str, metadata: Sequence[ImageMetadata], quality: int = _QUALITY) -> bytes:
    """Return the bytes of an image file that includes the metadata of one or more images.

    `suffix` selects the format. A contact sheet includes the metadata of several images. The output is
    deterministic. `quality`, from 0 to 100, applies to JPEG and WebP; PNG is lossless.
    """
    file_format = SUFFIXES[suffix.lower()]
    options = (
        _png_options(metadata) if file_format == "PNG" else {**_exif_options(metadata, file_format), "quality": quality}
    )
    if file_format != "PNG" and image.mode not in ("L", "RGB"):
        image = image.convert("RGB")
    stream = io.BytesIO()
    try:
        image.save(stream, file_format, **options)
    except ValueError as error:
        if "too long" not in str(error):  # Pillow's message for an EXIF block of more than 64 KiB
            raise
        raise UsageError(
            f"the metadata of {len(metadata)} image{'s' * (len(metadata) > 1)} is too large for a {file_format} file, "
            "which can contain at most 64 KiB of metadata",
            hint="use an output file name that ends with .png",
        ) from error
    return stream.getvalue()


def _software(metadata: Sequence[ImageMetadata]) -> str:
    return f"anyaccel {metadata[0].versions.get('anyaccel', '')}".rstrip()


def _format_parameters(metadata: Sequence[ImageMetadata]) -> str:
    return "\n\n".join(describe_metadata(item) for item in metadata)


def _png_options(metadata: Sequence[ImageMetadata]) -> dict[str, Any]:
    from PIL.PngImagePlugin import PngInfo

    text = PngInfo()
    text.add_text("Software", _software(metadata))
    # iTXt chunks are UTF-8; plain tEXt chunks allow only Latin-1.
    text.add_itxt(_PARAMETERS_KEY, _format_parameters(metadata))
    text.add_itxt(_DOCUMENT_KEY, write_document(metadata))
    return {"pnginfo": text}


def _exif_options(metadata: Sequence[ImageMetadata], file_format: str) -> dict[str, Any]:
    from PIL.Image import Exif

    exif = Exif()
    exif[_SOFTWARE] = _software(metadata)
    # XPComment is UTF-16; the other text tags of EXIF are limited to ASCII.
    exif[_XP_COMMENT] = _format_parameters(metadata).encode("utf-16-le")
    exif[_EXIF_IFD] = {_USER_COMMENT: _ASCII + write_document(metadata).encode("ascii")}
    return {"exif": exif} | ({"subsampling": 0} if file_format == "JPEG" else {})


def read_metadata(path: str | os.PathLike[str]) -> tuple[ImageMetadata, ...]:
    """Return the metadata in an image file: one item, or one per image on a contact sheet.

    Raises UsageError if the file contains no valid metadata.
    """
    text = _read_document_text(Path(path))
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


def _read_document_text(path: Path) -> str | None:
    """Return the JSON metadata document in an image file, or None if the file has none."""
    from PIL import Image, UnidentifiedImageError

    try:
        size = path.stat().st_size
        if size > _MAX_FILE_BYTES:
            raise UsageError(
                f"{path} has {size:,} bytes, but image files written by anyaccel have at most {_MAX_FILE_BYTES:,}",
                hint="pass an image file written by anyaccel",
            )
        # Only the formats that anyaccel writes: the file is untrusted, and Pillow has dozens of other decoders.
        with Image.open(path, formats=sorted(set(SUFFIXES.values()))) as image:
            if image.format == "PNG":
                record = image.info.get(_DOCUMENT_KEY)
            else:
                record = image.getexif().get_ifd(_EXIF_IFD).get(_USER_COMMENT)
    except UnidentifiedImageError as error:
        raise UsageError(
            f"{path} is not a valid PNG, JPEG or WebP file", hint="pass an image file written by anyaccel"
        ) from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(
            f"cannot read {path}: {reason}", hint="check the path and the permissions of the file"
        ) from error
    except (ValueError, SyntaxError, Image.DecompressionBombError) as error:  # raised by Pillow for damaged files
        raise UsageError(f"{path} is corrupted: {error}", hint="copy or download the file again") from error
    if isinstance(record, bytes):
        return record.removeprefix(_ASCII).rstrip(b"\0").decode("ascii", "replace") if _ASCII in record[:8] else None
    return str(record) if record is not None else None
