"""Reading image files with Pillow: limits, errors of damaged files, and the frames of animations."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean
from typing import BinaryIO

from PIL import Image, UnidentifiedImageError

from anyaccel.errors import UsageError
from anyaccel.media.source import COPY_AGAIN
from anyaccel.media.types import Video

__all__ = ["decode_frames", "open_image"]

# Duration of a frame if the file specifies none, as in browsers.
_DEFAULT_FRAME_MS = 100
# Resolution of the frame durations in a file.
_DURATION_UNIT_MS = {"GIF": 10, "WEBP": 1}


@contextmanager
def open_image(file: BinaryIO, pillow_format: str, name: str, *, max_pixels: int | None) -> Iterator[Image.Image]:
    """Open an image of one format; raise `UsageError` if it is too large or damaged, also while it is decoded."""
    try:
        with warnings.catch_warnings():
            # The caller's limit applies instead of Pillow's. An image of twice Pillow's limit is an error.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            # Only this format: Pillow has dozens of other decoders.
            image = Image.open(file, formats=[pillow_format])
        with image:
            if max_pixels is not None and image.width * image.height > max_pixels:
                raise UsageError(
                    f"{name} has {image.width}x{image.height} pixels, more than the maximum of {max_pixels:,} pixels",
                    hint="use a smaller image",
                )
            yield image
    except UnidentifiedImageError as error:
        raise UsageError(f"{name} is not a valid {pillow_format} file", hint=COPY_AGAIN) from error
    except UsageError:
        raise
    # Raised by Pillow for damaged files.
    except (OSError, EOFError, ValueError, SyntaxError, IndexError, Image.DecompressionBombError) as error:
        raise UsageError(f"{name} is corrupted: {error}", hint=COPY_AGAIN) from error


def decode_frames(image: Image.Image, name: str, *, max_frames: int) -> Video:
    """Return the frames of an opened image or animation."""
    frames: list[Image.Image] = []
    durations_ms: list[float] = []
    while True:
        try:
            image.seek(len(frames))
        except EOFError:
            break
        if len(frames) == max_frames:
            raise _too_many_frames(name, max_frames)
        frames.append(image.convert("RGB"))
        durations_ms.append(image.info.get("duration") or _DEFAULT_FRAME_MS)
    repeats = _count_repeats(durations_ms, _DURATION_UNIT_MS[str(image.format)])
    if sum(repeats) > max_frames:
        raise _too_many_frames(name, max_frames)
    repeated = [frame for frame, count in zip(frames, repeats, strict=True) for _ in range(count)]
    return Video(repeated, len(repeated) * 1000 / sum(durations_ms))


def _count_repeats(durations_ms: list[float], unit_ms: int) -> list[int]:
    """Return how often each frame is shown at a constant frame rate.

    Encoders store equal frames as one frame with a longer duration. The other durations differ by at most one unit,
    because they are rounded.
    """
    shortest = min(durations_ms)
    frame_ms = fmean(duration for duration in durations_ms if duration <= shortest + unit_ms)
    return [max(1, round(duration / frame_ms)) for duration in durations_ms]


def _too_many_frames(name: str, max_frames: int) -> UsageError:
    return UsageError(f"{name} has more than {max_frames} frames", hint="use a shorter video")
