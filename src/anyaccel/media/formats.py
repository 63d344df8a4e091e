"""File formats for images, video and audio, and checks that a format is available."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from anyaccel.errors import UsageError, nearest
from anyaccel.media.libraries import Extra, find_encoder, is_installed, require_extra

if TYPE_CHECKING:
    from anyaccel.media.types import Kind  # its module imports NumPy and Pillow

__all__ = ["SUFFIXES", "Format", "check_format", "check_frame_rate", "check_size", "default_suffix", "find_format"]


@dataclass(frozen=True)
class Format:
    """A file format."""

    suffix: str
    kinds: frozenset[Kind]
    """What a file can contain."""
    media_type: str
    """MIME type, such as `video/mp4`."""
    extra: Extra | None = None
    """Extra of anyaccel that installs the required library."""
    lossless: bool = False
    embeds_metadata: bool = True
    """Whether a file can contain the generation metadata."""
    max_side: int | None = None
    """Longest side in pixels that the format allows."""
    max_fps: float | None = None
    """Most frames per second that players show; None if there is no limit."""
    video_encoders: tuple[str, ...] = ()
    """FFmpeg encoders, the preferred one first."""
    audio_encoder: str | None = None
    """FFmpeg encoder of the audio track; None if a video has no audio track."""


# The time stamps of some formats overflow below and are too coarse above.
_MIN_FPS, _MAX_FPS = 0.01, 1000.0
_IMAGE: frozenset[Kind] = frozenset({"image"})
_VIDEO: frozenset[Kind] = frozenset({"video"})
_AUDIO: frozenset[Kind] = frozenset({"audio"})

SUFFIXES: Mapping[str, Format] = MappingProxyType(
    {
        item.suffix: item
        for item in (
            Format(".png", _IMAGE, "image/png", lossless=True),
            Format(".jpg", _IMAGE, "image/jpeg", max_side=65_535),
            Format(".jpeg", _IMAGE, "image/jpeg", max_side=65_535),
            Format(".webp", _IMAGE | _VIDEO, "image/webp", max_side=16_383),
            # Browsers show frames with a shorter duration for 100 ms.
            Format(".gif", _VIDEO, "image/gif", max_side=65_535, max_fps=50),
            Format(".mp4", _VIDEO, "video/mp4", "video", video_encoders=("libx264",), audio_encoder="aac"),
            Format(
                ".webm",
                _VIDEO,
                "video/webm",
                "video",
                video_encoders=("libvpx-vp9", "libsvtav1"),
                audio_encoder="libopus",
            ),
            # libsndfile skips comments of more than about 2,000 bytes when it reads a WAV file.
            Format(".wav", _AUDIO, "audio/wav", "audio", lossless=True, embeds_metadata=False),
            Format(".flac", _AUDIO, "audio/flac", "audio", lossless=True),
        )
    }
)
"""File formats by suffix."""


def find_format(suffix: str) -> Format:
    """Return the format for a file suffix such as `.mp4`; raise `UsageError` if it is unknown."""
    try:
        return SUFFIXES[suffix.lower()]
    except KeyError:
        raise UsageError(f"{suffix!r} is not a supported file suffix", hint=nearest(suffix.lower(), SUFFIXES)) from None


def default_suffix(kind: Kind) -> str:
    """Return the suffix for files of a kind: `.png`, `.wav`, and `.mp4`, or `.webp` if PyAV is not installed."""
    if kind == "video":
        return ".mp4" if is_installed("video") else ".webp"
    return {"image": ".png", "audio": ".wav"}[kind]


def check_format(suffix: str, kind: Kind, *, with_audio: bool = False) -> None:
    """Check that a format can contain a kind of media, and that its libraries are installed.

    Call this before generating anything. `with_audio` requires that a video can have an audio track.
    """
    file_format = find_format(suffix)
    suitable = [
        item.suffix
        for item in SUFFIXES.values()
        if kind in item.kinds and not (with_audio and kind == "video" and item.audio_encoder is None)
    ]
    if file_format.suffix not in suitable:
        content = "video with an audio track" if kind == "video" and kind in file_format.kinds else _NAMES[kind]
        raise UsageError(
            f"a {file_format.suffix} file cannot contain {content}",
            hint=f"use a file name that ends with {' or '.join(suitable)}",
        )
    if file_format.extra is None:
        return
    use = f"{file_format.suffix} files"
    require_extra(file_format.extra, use)
    if file_format.video_encoders:
        find_encoder(file_format.video_encoders, use)
    if with_audio and file_format.audio_encoder is not None:
        find_encoder((file_format.audio_encoder,), f"{use} with an audio track")


_NAMES: Mapping[Kind, str] = {"image": "an image", "video": "video", "audio": "audio without video"}


def check_size(suffix: str, kind: Kind, width: int, height: int) -> None:
    """Raise `UsageError` if an image or video is too large for a format."""
    limit = find_format(suffix).max_side
    side = max(width, height)
    if limit is not None and side > limit:
        larger = [item.suffix for item in SUFFIXES.values() if kind in item.kinds and (item.max_side or side) >= side]
        raise UsageError(
            f"a {suffix} file can have at most {limit} pixels per side, not {width}x{height}",
            hint=f"use a file name that ends with {' or '.join(larger)}, or a smaller size",
        )


def check_frame_rate(suffix: str, fps: float) -> None:
    """Raise `UsageError` if a format does not support a number of frames per second."""
    limit = find_format(suffix).max_fps
    if not _MIN_FPS <= fps <= _MAX_FPS:
        raise UsageError(
            f"a video must have from {_MIN_FPS:g} to {_MAX_FPS:g} frames per second, not {fps:g}",
            hint="pass another frame rate, such as 24",
        )
    if limit is not None and fps > limit:
        raise UsageError(
            f"a {suffix} file can have at most {limit:g} frames per second, not {fps:g}",
            hint="use a file name that ends with .webp or .mp4, or a lower frame rate",
        )
