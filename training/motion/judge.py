"""Judge for videos of one moving thing: whether it stays the same thing, and whether it moves as requested.

1. Every frame is measured: position and size of the bounding box, opacity from the difference from the background,
   and, if a rotation is requested, the angle at which the frame is most similar to the upright thing.
2. The frame is rotated back and made opaque again. `anyaccel.embedded.judge` must then recognize the thing.
3. The measured track must match the requested motion, and its other properties must stay constant.

Known limitations: the angle cannot be measured for things that look nearly the same when rotated (`is_turnable`), and
a thing with less than a third of its opacity is not identified.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from anyaccel.embedded.judge import BACKGROUNDS, Judge, load_judge

__all__ = ["Measured", "VideoVerdict", "is_turnable", "judge_video", "moves_as"]

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]

_MIN_OPACITY = 1 / 3  # of a frame in which the thing must be recognized
_MIN_RECOGNIZED = 0.9  # share of frames
_ANGLES = 16
_TURNABLE_DISTANCE = 0.12


@dataclass(frozen=True)
class Measured:
    """Properties of the thing, one value per frame; NaN for frames that show nothing."""

    x: Array
    y: Array
    size: Array
    """Longest side of the bounding box, in pixels."""
    opacity: Array
    """Relative to the first frame."""
    angle: Array
    """Clockwise, in degrees; 0 unless a rotation was requested."""


@dataclass(frozen=True)
class VideoVerdict:
    """Result for one video."""

    recognized: tuple[bool, ...]
    """For each frame, whether it shows the requested thing."""
    moves: bool
    """Whether the thing moves as requested."""
    measured: Measured

    @property
    def same_thing(self) -> bool:
        """Whether at least nine tenths of the frames show the requested thing."""
        return sum(self.recognized) >= max(1, _MIN_RECOGNIZED * len(self.recognized))

    @property
    def correct(self) -> bool:
        """Whether both the thing and the motion are correct."""
        return self.same_thing and self.moves


def judge_video(frames: Sequence[Image.Image], thing: str, motion: str) -> VideoVerdict:
    """Judge a video for a requested thing (its first name) and motion (a key of `MOTIONS`, or `still`)."""
    judge = load_judge()
    measured, upright = _measure(frames, thing, motion, judge)
    group = judge.groups[judge.names.index(thing)]
    recognized = tuple(
        judge.classify(frame).groups[:1] == (group,)
        for frame, opacity in zip(upright, measured.opacity, strict=True)
        if motion != "fade" or opacity >= _MIN_OPACITY
    )
    return VideoVerdict(recognized, _MATCHES[motion](measured), measured)


def moves_as(frames: Sequence[Image.Image], thing: str, motion: str) -> bool:
    """Return whether a video shows a motion, without identifying the thing in every frame."""
    return _MATCHES[motion](_measure(frames, thing, motion, load_judge())[0])


def is_turnable(thing: str) -> bool:
    """Return whether a thing looks different when it is rotated, so that its angle can be measured."""
    judge = load_judge()
    tile = Image.fromarray((judge.glyphs[judge.names.index(thing)] * 255).round().astype(np.uint8))
    canvas = Image.new("RGB", (128, 128), BACKGROUNDS["white"])
    glyph = tile.resize((76, 76))
    canvas.paste(glyph, (26, 26), glyph)
    return all(judge.distance(_rotate(canvas, angle), thing) > _TURNABLE_DISTANCE for angle in range(45, 360, 45))


def _difference(frame: Image.Image, judge: Judge) -> tuple[Array, Array]:
    """Return the pixels' difference from the background, and the background color."""
    color = np.asarray(BACKGROUNDS[judge.background(frame)], np.float64)
    return np.asarray(frame.convert("RGB"), np.float64) - color, color


def _measure_opacity(frames: Sequence[Image.Image], judge: Judge) -> Array:
    """Return the opacity of the thing relative to the first frame, if its size is constant."""
    energies = np.array([np.square(_difference(frame, judge)[0]).sum() for frame in frames])
    opacity: Array = np.sqrt(energies / max(energies[0], 1.0))
    return opacity


def _make_opaque(frame: Image.Image, opacity: float) -> Image.Image:
    difference, color = _difference(frame, load_judge())
    pixels = color + difference / np.clip(opacity, 0.05, 1.0)
    return Image.fromarray(pixels.round().clip(0, 255).astype(np.uint8))


def _rotate(frame: Image.Image, clockwise: float) -> Image.Image:
    color = BACKGROUNDS[load_judge().background(frame)]
    return frame.rotate(-clockwise, Image.Resampling.BICUBIC, fillcolor=color)


def _measure_angle(frame: Image.Image, thing: str, judge: Judge) -> float:
    """Return the clockwise angle at which the thing was drawn, to the nearest 22.5 degrees."""
    angles = [360 * index / _ANGLES for index in range(_ANGLES)]
    return min(angles, key=lambda angle: judge.distance(_rotate(frame, -angle), thing))


def _measure(
    frames: Sequence[Image.Image], thing: str, motion: str, judge: Judge
) -> tuple[Measured, Sequence[Image.Image]]:
    """Return the measurements for a requested motion, and the frames with the thing upright and opaque."""
    opacity, angles = _measure_opacity(frames, judge), np.zeros(len(frames))
    if motion == "fade":
        frames = [_make_opaque(frame, value) for frame, value in zip(frames, opacity, strict=True)]
    boxes = [judge.locate(frame) or (math.nan,) * 4 for frame in frames]
    if motion == "spin":
        angles = np.array([_measure_angle(frame, thing, judge) for frame in frames])
        frames = [_rotate(frame, -angle) for frame, angle in zip(frames, angles, strict=True)]
    top, left, bottom, right = np.array(boxes).T
    size = np.maximum(bottom - top, right - left)
    return Measured((left + right) / 2, (top + bottom) / 2, size, opacity, angles), frames


def _slope(values: Array) -> tuple[float, float]:
    """Return the change over all frames of the fitted line, and the largest distance from this line."""
    if not np.isfinite(values).all():
        return math.nan, math.nan
    frame = np.arange(len(values))
    gradient, start = np.polyfit(frame, values, 1)
    return float(gradient * (len(values) - 1)), float(np.abs(values - start - gradient * frame).max())


def _share_explained(values: Array, waves: Sequence[Array]) -> tuple[float, float]:
    """Return the share of the variance that waves (up to factors) and a constant explain, and the fitted range."""
    if not np.isfinite(values).all():
        return math.nan, math.nan
    basis = np.stack([np.ones(len(values)), *waves], 1)
    fitted = basis @ np.linalg.lstsq(basis, values, rcond=None)[0]
    return 1 - float(np.var(values - fitted) / max(np.var(values), 1e-6)), float(np.ptp(fitted))


def _is_constant(values: Array, tolerance: float) -> bool:
    return len(values) > 0 and bool(np.ptp(values) <= tolerance)  # False for NaN


def _has_constant_size(seen: Measured) -> bool:
    return _is_constant(seen.size / np.median(seen.size), 0.25)


def _is_opaque(seen: Measured) -> bool:
    return _is_constant(seen.opacity, 0.3)


def _travels(axis: str, direction: int) -> Callable[[Measured], bool]:
    def matches(seen: Measured) -> bool:
        along, across = (seen.x, seen.y) if axis == "x" else (seen.y, seen.x)
        distance, error = _slope(along)
        return (
            direction * distance > 36
            and error < 6
            and _is_constant(across, 9)
            and _has_constant_size(seen)
            and _is_opaque(seen)
        )

    return matches


def _bounces(seen: Measured) -> bool:
    frame = np.arange(len(seen.y)) / len(seen.y)
    arcs = [[np.abs(np.sin(math.pi * (2 * frame + phase)))] for phase in np.arange(0.2, 0.8, 0.05)]
    share, height = max(_share_explained(seen.y, arc) for arc in arcs)
    return share > 0.85 and height > 30 and _is_constant(seen.x, 9) and _has_constant_size(seen) and _is_opaque(seen)


def _spins(seen: Measured) -> bool:
    expected = 360 * np.arange(len(seen.angle)) / len(seen.angle)
    error = np.abs((seen.angle - expected + 180) % 360 - 180)
    stays = _is_constant(seen.x, 24) and _is_constant(seen.y, 24)  # the box of a rotated thing moves a little
    return bool(np.mean(error < 30) >= _MIN_RECOGNIZED and stays and _is_opaque(seen))


def _scales(direction: int) -> Callable[[Measured], bool]:
    def matches(seen: Measured) -> bool:
        change, error = _slope(seen.size)
        stays = _is_constant(seen.x, 9) and _is_constant(seen.y, 9)
        return direction * change > 36 and error < 8 and stays

    return matches


def _shakes(seen: Measured) -> bool:
    frame = math.pi / 2 * np.arange(len(seen.x))
    share, width = _share_explained(seen.x, (np.sin(frame), np.cos(frame)))
    stays = _is_constant(seen.y, 9) and _has_constant_size(seen)
    return share > 0.8 and 10 < width < 32 and stays and _is_opaque(seen)


def _fades(seen: Measured) -> bool:
    change, error = _slope(seen.opacity)
    visible = seen.opacity >= _MIN_OPACITY
    stays = all(_is_constant(values[visible], 9) for values in (seen.x, seen.y, seen.size))
    return change < -0.65 and error < 0.15 and seen.opacity[-1] < _MIN_OPACITY and stays


def _is_still(seen: Measured) -> bool:
    return all(_is_constant(values, 7) for values in (seen.x, seen.y, seen.size)) and _is_opaque(seen)


_MATCHES: dict[str, Callable[[Measured], bool]] = {
    "left": _travels("x", -1),
    "right": _travels("x", 1),
    "up": _travels("y", -1),
    "down": _travels("y", 1),
    "bounce": _bounces,
    "spin": _spins,
    "grow": _scales(1),
    "shrink": _scales(-1),
    "shake": _shakes,
    "fade": _fades,
    "still": _is_still,
}
