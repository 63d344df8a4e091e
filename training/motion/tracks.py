"""Motions as tracks: position, size, angle and opacity of one thing in every frame."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from training.captions import IMAGE_PIXELS

__all__ = ["KINDS", "STILL", "Track", "make_track"]

Track = np.ndarray[Any, np.dtype[np.float32]]
"""[frames, 5]: center x and y and side length in pixels, angle in degrees (clockwise), opacity from 0 to 1."""

STILL = "still"
_CENTER = IMAGE_PIXELS / 2
_SIZE_OF_TRAVELER = 52.0
_MARGIN = 28.0  # of the center from the border, so that a traveler stays in the image
_BOUNCES = 2


def make_track(motion: str, frames: int, rng: random.Random) -> Track:
    """Return a random track of a motion; it starts anywhere from which the thing stays in the image."""
    x, y, size, angle, opacity = KINDS[motion](np.arange(frames, dtype=np.float32), rng)
    columns = np.broadcast_arrays(x, y, size, angle, opacity, np.zeros(frames))[:5]
    return np.stack(columns, 1).astype(np.float32)


_Values = tuple[Any, Any, Any, Any, Any]


def _near(value: float, spread: float, rng: random.Random) -> float:
    return value + rng.uniform(-spread, spread)


def _travel(axis: int, direction: int) -> Callable[[Track, random.Random], _Values]:
    """Return the track along an axis (0: x, 1: y), at constant speed."""

    def track(frame: Track, rng: random.Random) -> _Values:
        distance = rng.uniform(50.0, 66.0)
        free = IMAGE_PIXELS - 2 * _MARGIN - distance
        start = _MARGIN + rng.uniform(0, free) + (0 if direction > 0 else distance)
        along = start + direction * distance * frame / (len(frame) - 1)
        across = _near(_CENTER, 8, rng)
        x, y = (along, across) if axis == 0 else (across, along)
        return x, y, _near(_SIZE_OF_TRAVELER, 1.5, rng), 0.0, 1.0

    return track


def _bounce(frame: Track, rng: random.Random) -> _Values:
    height = rng.uniform(44.0, 60.0)
    floor = _near(_CENTER + height / 2, 5, rng)
    phase = _near(0.5, 0.15, rng)  # near the top of the first arc
    y = floor - height * np.abs(np.sin(math.pi * (_BOUNCES * frame / len(frame) + phase)))
    return _near(_CENTER, 8, rng), y, _near(_SIZE_OF_TRAVELER, 1.5, rng), 0.0, 1.0


def _spin(frame: Track, rng: random.Random) -> _Values:
    return _near(_CENTER, 2, rng), _near(_CENTER, 2, rng), _near(76.0, 2, rng), 360 * frame / len(frame), 1.0


def _scale(start: tuple[float, float], end: tuple[float, float]) -> Callable[[Track, random.Random], _Values]:
    def track(frame: Track, rng: random.Random) -> _Values:
        first, last = rng.uniform(*start), rng.uniform(*end)
        size = first + (last - first) * frame / (len(frame) - 1)
        return _near(_CENTER, 3, rng), _near(_CENTER, 3, rng), size, 0.0, 1.0

    return track


def _shake(frame: Track, rng: random.Random) -> _Values:
    amplitude, direction = rng.uniform(8.0, 12.0), rng.choice((-1, 1))
    x = _near(_CENTER, 3, rng) + direction * amplitude * np.sin(math.pi / 2 * frame)
    return x, _near(_CENTER, 3, rng), _near(72.0, 2, rng), 0.0, 1.0


def _fade(frame: Track, rng: random.Random) -> _Values:
    last = rng.uniform(0.05, 0.12)
    opacity = 1 + (last - 1) * frame / (len(frame) - 1)
    return _near(_CENTER, 2, rng), _near(_CENTER, 2, rng), _near(80.0, 2, rng), 0.0, opacity


def _still(frame: Track, rng: random.Random) -> _Values:
    return _near(_CENTER, 2, rng), _near(_CENTER, 2, rng), _near(88.0, 2.6, rng), 0.0, 1.0


_SMALL, _LARGE = (38.0, 44.0), (96.0, 106.0)
KINDS: dict[str, Callable[[Track, random.Random], _Values]] = {
    "left": _travel(0, -1),
    "right": _travel(0, 1),
    "up": _travel(1, -1),
    "down": _travel(1, 1),
    "bounce": _bounce,
    "spin": _spin,
    "grow": _scale(_SMALL, _LARGE),
    "shrink": _scale(_LARGE, _SMALL),
    "shake": _shake,
    "fade": _fade,
    STILL: _still,
}
