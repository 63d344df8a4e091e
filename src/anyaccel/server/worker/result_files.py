"""Files of a finished image, video or audio: its content, and small images that show it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from PIL import Image

from anyaccel.generation.media_format import encode_media
from anyaccel.generation.metadata import MediaMetadata
from anyaccel.media.encode import encode
from anyaccel.media.formats import SUFFIXES as FORMATS
from anyaccel.media.formats import check_format
from anyaccel.media.stills import make_spritesheet, make_thumbnail
from anyaccel.media.types import Audio, Media, Video
from anyaccel.server.worker.job_spec import INPUT_MARK, SUFFIXES, JobSpec

__all__ = ["ResultFiles", "check_result_format", "encode_result"]

_PREVIEW_QUALITY = 80


@dataclass(frozen=True, kw_only=True)
class ResultFiles:
    """The file of a result, further files by name, and properties of the result."""

    content: bytes
    files: Mapping[str, bytes]
    width: int
    height: int
    """0 for audio."""
    details: Mapping[str, Any]


def check_result_format(spec: JobSpec, *, with_audio: bool) -> None:
    """Raise before anything is computed if the requested format cannot be written."""
    suffix = SUFFIXES[spec.output_format]
    # Animated images have no audio track; the audio of the video is then left out.
    check_format(suffix, spec.kind, with_audio=with_audio and FORMATS[suffix].audio_encoder is not None)


def encode_result(
    media: Media,
    spec: JobSpec,
    metadata: MediaMetadata,
    inputs: Mapping[str, str | bytes],
    on_frame: Callable[[int, int], None],
) -> ResultFiles:
    """Encode a result; `on_frame` is called after each frame of a video, and stops the encoding if it raises.

    Inputs of a video are stored with it, because they are needed again to change it.
    """
    suffix = SUFFIXES[spec.output_format]
    if isinstance(media, Video) and FORMATS[suffix].audio_encoder is None:
        media = replace(media, audio=None)
    encoded = encode_media(media, suffix, [metadata], spec.output_compression, on_frame)
    files: dict[str, bytes] = {}
    details: dict[str, Any] = {}
    if isinstance(media, Video):
        files["thumbnail.webp"] = _encode_preview(make_thumbnail(media), ".webp")
        files["spritesheet.jpg"] = _encode_preview(make_spritesheet(media), ".jpg")
        files |= {f"{INPUT_MARK[1:]}{name}": _read(source) for name, source in inputs.items()}
        details = {
            "num_frames": len(media), "fps": media.fps, "length_s": media.seconds,
            "with_audio": media.audio is not None,
        }  # fmt: skip
    elif isinstance(media, Audio):
        files["waveform.webp"] = _encode_preview(make_thumbnail(media), ".webp")
        details = {"length_s": media.seconds, "sampling_rate": media.rate, "channels": len(media.samples)}
    if encoded.sidecar is not None:
        files["json"] = encoded.sidecar
    width, height = (0, 0) if isinstance(media, Audio) else (media.width, media.height)
    return ResultFiles(content=encoded.content, files=files, width=width, height=height, details=details)


def _encode_preview(image: Image.Image, suffix: str) -> bytes:
    return encode(image, suffix, quality=_PREVIEW_QUALITY)


def _read(source: str | bytes) -> bytes:
    if isinstance(source, bytes):
        return source
    with open(source, "rb") as file:
        return file.read()
