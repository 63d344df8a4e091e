"""Types of media that pipelines generate: images, video and audio."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from PIL import Image

from anyaccel.errors import UsageError

__all__ = ["Audio", "EmbeddedMetadata", "Kind", "Media", "OnFrame", "Video", "kind_of"]

Kind = Literal["image", "video", "audio"]
OnFrame = Callable[[int, int], None]
"""Function that is called as `on_frame(done, total)` after each frame."""


@dataclass(frozen=True, eq=False)
class Audio:
    """Audio samples."""

    samples: np.ndarray[Any, np.dtype[np.float32]]
    """Array of shape (channels, samples), with values from -1 to 1."""
    rate: int
    """Samples per second."""

    def __post_init__(self) -> None:
        samples = self.samples
        if not isinstance(samples, np.ndarray) or samples.dtype != np.float32 or samples.ndim != 2 or not samples.size:
            found = (
                f"{samples.dtype} of shape {samples.shape}"
                if isinstance(samples, np.ndarray)
                else type(samples).__name__
            )
            raise UsageError(
                f"audio samples must be a non-empty float32 array of shape (channels, samples), not {found}",
                hint="convert them with `np.atleast_2d(samples).astype(np.float32)`",
            )
        if self.rate <= 0:
            raise UsageError(
                f"the sample rate must be positive, not {self.rate}", hint="pass the samples per second, such as 48000"
            )

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return float(self.samples.shape[1] / self.rate)


@dataclass(frozen=True, eq=False)
class Video:
    """Frames of a video, with an optional audio track."""

    frames: Sequence[Image.Image]
    """RGB images of the same size."""
    fps: float
    """Frames per second."""
    audio: Audio | None = None

    def __post_init__(self) -> None:
        if not self.frames:
            raise UsageError("a video must have at least one frame", hint="pass a non-empty list of images as `frames`")
        first = self.frames[0]
        for index, frame in enumerate(self.frames):
            if frame.size != first.size or frame.mode != "RGB":
                raise UsageError(
                    f"the frames of a video must be RGB images of the same size: frame 0 is {_describe(first)}, "
                    f"frame {index} is {_describe(frame)}",
                    hint='convert the frames with `frame.convert("RGB")` and `frame.resize(size)`',
                )
        if not (math.isfinite(self.fps) and self.fps > 0):
            raise UsageError(
                f"the frame rate must be a positive number, not {self.fps}",
                hint="pass the frames per second, such as 24",
            )

    def __len__(self) -> int:
        return len(self.frames)

    @property
    def width(self) -> int:
        """Width of each frame in pixels."""
        return self.frames[0].width

    @property
    def height(self) -> int:
        """Height of each frame in pixels."""
        return self.frames[0].height

    @property
    def seconds(self) -> float:
        """Duration of the frames in seconds; the audio track may have another one."""
        return len(self.frames) / self.fps


Media: TypeAlias = Image.Image | Video | Audio


def kind_of(media: Media) -> Kind:
    """Return whether an object is an image, a video or audio."""
    if isinstance(media, Image.Image):
        return "image"
    if isinstance(media, Video):
        return "video"
    if isinstance(media, Audio):
        return "audio"
    raise UsageError(
        f"{type(media).__name__} is not an image, a video or audio",
        hint="pass a PIL image, anyaccel.media.types.Video or anyaccel.media.types.Audio",
    )


@dataclass(frozen=True)
class EmbeddedMetadata:
    """Texts that are embedded in a file."""

    document: str | None
    """JSON text with the generation metadata; ASCII, because EXIF allows only ASCII."""
    comment: str | None
    """Text for readers, such as the prompt."""
    software: str
    """Name and version of the program."""


def _describe(image: Image.Image) -> str:
    return f"{image.mode} of {image.width}x{image.height} pixels"
