"""Decoding untrusted files to images, video and audio, with limits on their size."""

from __future__ import annotations

import re
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps

from anyaccel.errors import UsageError
from anyaccel.media.audio_files import decode_audio_file, read_flac_document
from anyaccel.media.formats import SUFFIXES
from anyaccel.media.image_files import IMAGE_FORMATS, read_image_document
from anyaccel.media.libraries import require_extra
from anyaccel.media.opened_image import decode_frames, open_image
from anyaccel.media.output import find_sidecar
from anyaccel.media.source import check_kind, name_source, open_source
from anyaccel.media.types import Audio, Video
from anyaccel.media.video_decoding import decode_audio_track, decode_video_file, read_video_document

__all__ = ["FOLDER_FPS", "decode_audio", "decode_image", "decode_video", "read_document"]

FOLDER_FPS = 10.0
"""Frame rate of a folder of images: the default of diffusers' `export_to_video` and `export_to_gif`."""

_VIDEO_SUFFIXES = frozenset({".mp4", ".webm"})
# Larger than any file that anyaccel writes.
_MAX_FILE_BYTES, _MAX_SIDECAR_BYTES = 2**30, 2**24


def decode_image(source: Path | bytes, *, max_pixels: int, name: str | None = None) -> Image.Image:
    """Return the image in a PNG, JPEG, WebP or GIF file; the first frame of an animation.

    The mode is `L`, `LA`, `RGB` or `RGBA`, and the EXIF orientation is applied. Raises `UsageError` if the image has
    more than `max_pixels`, or if the file is damaged or contains something else. `name` is how errors name the source.
    """
    name = name or name_source(source)
    with open_source(source) as (file, suffix):
        suffix = check_kind(suffix, "image", name, also=frozenset({".gif"}))
        with open_image(file, IMAGE_FORMATS[suffix], name, max_pixels=max_pixels) as image:
            image.load()
            return _simplify_mode(ImageOps.exif_transpose(image))


def decode_video(source: Path | bytes, *, max_frames: int, max_pixels: int, name: str | None = None) -> Video:
    """Return the video in an MP4, WebM, WebP or GIF file, or from a folder of images in the order of their names.

    Raises `UsageError` if there are more than `max_frames`, if a frame has more than `max_pixels`, or if the file is
    damaged or contains something else.
    """
    name = name or name_source(source)
    if isinstance(source, Path) and source.is_dir():
        return _decode_folder(source, max_frames, max_pixels)
    with open_source(source) as (file, suffix):
        suffix = check_kind(suffix, "video", name)
        if suffix in _VIDEO_SUFFIXES:
            require_extra("video", f"{suffix} files")
            return decode_video_file(file, suffix, name, max_frames=max_frames, max_pixels=max_pixels)
        with open_image(file, IMAGE_FORMATS[suffix], name, max_pixels=max_pixels) as image:
            return decode_frames(image, name, max_frames=max_frames)


def decode_audio(source: Path | bytes, *, max_seconds: float, name: str | None = None) -> Audio:
    """Return the audio in a WAV or FLAC file, or the audio track of an MP4 or WebM file.

    Raises `UsageError` if it is longer than `max_seconds`, or if the file is damaged or contains something else.
    """
    name = name or name_source(source)
    with open_source(source) as (file, suffix):
        suffix = check_kind(suffix, "audio", name, also=_VIDEO_SUFFIXES)
        if suffix in _VIDEO_SUFFIXES:
            require_extra("video", f"{suffix} files")
            return decode_audio_track(file, suffix, name, max_seconds=max_seconds)
        require_extra("audio", f"{suffix} files")
        return decode_audio_file(file, name, max_seconds=max_seconds)


def read_document(path: Path) -> str | None:
    """Return the metadata document in a file, or else in its sidecar `<name>.json`; None if there is none."""
    with open_source(path) as (file, suffix):
        size = path.stat().st_size
        if size > _MAX_FILE_BYTES:
            raise UsageError(
                f"{path} has {size:,} bytes, but files written by anyaccel have at most {_MAX_FILE_BYTES:,}",
                hint="pass a file written by anyaccel",
            )
        if suffix is None:
            raise UsageError(
                f"{path} is not a valid file of a supported format",
                hint=f"pass a file written by anyaccel: {', '.join(SUFFIXES)}",
            )
        document = _read_embedded_document(file, suffix, str(path))
    return document if document is not None else _read_sidecar(path)


def _read_embedded_document(file: BinaryIO, suffix: str, name: str) -> str | None:
    if suffix in IMAGE_FORMATS:
        with open_image(file, IMAGE_FORMATS[suffix], name, max_pixels=None) as image:
            return read_image_document(image)
    if not SUFFIXES[suffix].embeds_metadata:
        return None
    if suffix in _VIDEO_SUFFIXES:
        require_extra("video", f"{suffix} files")
        return read_video_document(file, suffix, name)
    require_extra("audio", f"{suffix} files")
    return read_flac_document(file, name)


def _read_sidecar(path: Path) -> str | None:
    sidecar = find_sidecar(path)
    if not sidecar.is_file():
        return None
    try:
        with sidecar.open("rb") as file:
            content = file.read(_MAX_SIDECAR_BYTES + 1)
        text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {sidecar}: {error}", hint="copy or download the file again") from error
    if len(content) > _MAX_SIDECAR_BYTES:
        raise UsageError(
            f"{sidecar} has more than {_MAX_SIDECAR_BYTES:,} bytes", hint="pass a file written by anyaccel"
        )
    return text


def _decode_folder(folder: Path, max_frames: int, max_pixels: int) -> Video:
    paths = [
        path for path in folder.iterdir() if path.suffix.lower() in IMAGE_FORMATS and not path.name.startswith(".")
    ]
    if not paths:
        raise UsageError(f"{folder} contains no images", hint=f"pass a folder with {', '.join(IMAGE_FORMATS)} files")
    if len(paths) > max_frames:
        raise UsageError(
            f"{folder} contains {len(paths)} images, and a video may have at most {max_frames} frames",
            hint="pass a folder with fewer images",
        )
    frames = [decode_image(path, max_pixels=max_pixels).convert("RGB") for path in sorted(paths, key=_natural_order)]
    for path, frame in zip(sorted(paths, key=_natural_order), frames, strict=True):
        if frame.size != frames[0].size:
            raise UsageError(
                f"{path} has {frame.width}x{frame.height} pixels, and the first image of the folder has "
                f"{frames[0].width}x{frames[0].height}",
                hint="use images of the same size",
            )
    return Video(frames, FOLDER_FPS)


def _natural_order(path: Path) -> tuple[tuple[int, str], ...]:
    """Return a sort key that sorts `frame-2` before `frame-10`."""
    return tuple((int(number or 0), text) for text, number in re.findall(r"(\D*)(\d*)", path.name))


def _simplify_mode(image: Image.Image) -> Image.Image:
    if image.mode in ("L", "LA", "RGB", "RGBA"):
        return image
    if image.mode == "1":
        return image.convert("L")
    if image.mode.startswith("I"):  # 16 bits per sample
        return Image.fromarray((np.asarray(image) / 257).clip(0, 255).round().astype(np.uint8))
    return image.convert("RGBA" if image.has_transparency_data else "RGB")
