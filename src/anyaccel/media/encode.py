"""Encoding images, video and audio to files."""

from __future__ import annotations

import functools
import json
import re
from importlib.metadata import version

from anyaccel.errors import UsageError
from anyaccel.media.audio_files import encode_audio
from anyaccel.media.formats import check_format, check_frame_rate, check_size, find_format
from anyaccel.media.image_files import IMAGE_FORMATS, encode_animation, encode_image
from anyaccel.media.types import Audio, EmbeddedMetadata, Kind, Media, OnFrame, Video, kind_of
from anyaccel.media.video_files import encode_video

__all__ = ["encode", "estimate_bytes"]

# Largest size of noise, which compresses worst, in bytes per pixel of each frame.
_BYTES_PER_PIXEL = {
    ".png": 4.1,
    ".jpg": 2.8,
    ".jpeg": 2.8,
    ".webp": 1.3,
    ".gif": 1.8,
    ".mp4": 1.2,
    ".webm": 1.2,
}
# Stereo with 48,000 samples per second: 16 bits per sample in audio files, 256 kbit/s in video files.
_AUDIO_BYTES_PER_SECOND = {".wav": 192_000, ".flac": 200_000, ".mp4": 35_000, ".webm": 35_000}
# Headers and metadata of a file, and headers and color table of a frame.
_FILE_BYTES, _FRAME_BYTES = 128 * 1024, 2048


def encode(
    media: Media,
    suffix: str,
    *,
    document: str | None = None,
    comment: str | None = None,
    quality: int = 95,
    on_frame: OnFrame | None = None,
    software: str | None = None,
) -> bytes:
    """Return the bytes of a file that contains an image, a video or audio. The same input gives the same bytes.

    `suffix` selects the format. `document` is JSON text with the generation metadata, which is embedded if the format
    can contain it. For other formats, `write_media` writes it to a separate file. `comment` is text for readers, such
    as the prompt. GIF and FLAC files have one comment, which is the document if there is one.

    `quality`, from 0 to 100, applies to all lossy formats except GIF. `on_frame` is called as `on_frame(done, total)`
    after each frame. If it raises an exception, the encoding stops. `software` is the name and version that image files
    contain, by default those of anyaccel.
    """
    kind = kind_of(media)
    check_format(suffix, kind, with_audio=isinstance(media, Video) and media.audio is not None)
    if not 0 <= quality <= 100:
        raise UsageError(f"the quality must be from 0 to 100, not {quality}", hint="omit it to use the default, 95")
    metadata = EmbeddedMetadata(
        document=_escape_non_ascii(document) if document is not None else None,
        comment=comment,
        software=software or _name_version(),
    )
    if isinstance(media, Video):
        check_size(suffix, kind, media.width, media.height)
        check_frame_rate(suffix, media.fps)
        encode_frames = encode_animation if suffix.lower() in IMAGE_FORMATS else encode_video
        return encode_frames(media, suffix, metadata, quality, on_frame)
    if isinstance(media, Audio):
        content = encode_audio(media, suffix, metadata)
    else:
        check_size(suffix, kind, *media.size)
        content = encode_image(media, suffix, metadata, quality)
    if on_frame is not None:
        on_frame(1, 1)
    return content


@functools.cache
def _name_version() -> str:
    return f"anyaccel {version('anyaccel')}"


def _escape_non_ascii(document: str) -> str:
    """Return JSON text in which characters that are not ASCII are escaped, because EXIF allows only ASCII."""
    return re.sub(r"[^\x00-\x7f]+", lambda match: json.dumps(match[0])[1:-1], document)


def estimate_bytes(kind: Kind, suffix: str, *, width: int, height: int, frames: int, seconds: float) -> int:
    """Return an upper estimate of the size of a file at the default quality, for the check of the free disk space.

    For an image, `frames` is 1 and `seconds` is 0; for audio, the first three are 0. The audio is assumed to be stereo
    with 48,000 samples per second.
    """
    file_format = find_format(suffix)
    pixels = width * height * frames if kind != "audio" else 0
    size = pixels * _BYTES_PER_PIXEL.get(file_format.suffix, 0) + frames * _FRAME_BYTES + _FILE_BYTES
    return int(size + seconds * _AUDIO_BYTES_PER_SECOND.get(file_format.suffix, 0))
