"""Images, video and audio for the tests of `anyaccel.media`."""

import json
from typing import TypedDict

import numpy as np
from PIL import Image

from anyaccel.media.types import Audio, Video

DOCUMENT = json.dumps({"format": 2, "prompt": "ein grüner Baum 🌳", "text": "x" * 20_000})
"""A metadata document of 20 KB, in ASCII as `json.dumps` writes it."""


class Limits(TypedDict):
    """Arguments of `decode_video`."""

    max_frames: int
    max_pixels: int


LIMITS: Limits = {"max_frames": 100, "max_pixels": 10**6}


def make_frame(width: int = 64, height: int = 48, time: float = 0.0) -> Image.Image:
    """Return a smooth image with a darker square that moves with the time."""
    row, column = np.mgrid[:height, :width]
    red = 128 + 100 * np.sin(3 * column / width + time)
    green = 128 + 100 * np.cos(3 * row / height + 2 * time)
    blue = 128 + 90 * np.sin(4 * (column + row) / (width + height))
    left = width * (0.1 + 0.2 * time)
    is_dark = (column >= left) & (column < left + width / 4) & (row >= height / 4) & (row < height / 2)
    # The same for all colors: video has full resolution only for brightness.
    pixels = np.stack([red, green, blue], axis=-1) - 25 * is_dark[..., None]
    return Image.fromarray(pixels.astype(np.uint8))


def make_video(
    frames: int = 6, fps: float = 24.0, *, width: int = 64, height: int = 48, audio: Audio | None = None
) -> Video:
    return Video([make_frame(width, height, index / 6) for index in range(frames)], fps, audio)


def make_audio(seconds: float = 0.5, rate: int = 48_000, channels: int = 2) -> Audio:
    """Return tones that have another frequency in each channel."""
    time = np.arange(round(seconds * rate)) / rate
    tones = [0.5 * np.sin(2 * np.pi * 440 * (channel + 1) * time) for channel in range(channels)]
    return Audio(np.stack(tones).astype(np.float32), rate)


def make_noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def measure_psnr(image: Image.Image, expected: Image.Image) -> float:
    """Return the peak signal-to-noise ratio in dB."""
    difference = np.asarray(image, dtype=float) - np.asarray(expected, dtype=float)
    return float(10 * np.log10(255**2 / max(float(np.mean(difference**2)), 1e-9)))
