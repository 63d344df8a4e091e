"""Object recognition for images from the embedded model, by comparison with its training glyphs.

1. The median color of the border, rounded to the nearest training color, is the background color.
2. Pixels that differ from the background are cropped and scaled to a small square, the descriptor.
3. The result is the training glyph with the nearest descriptor on the same background.

Glyphs that this method cannot distinguish share a group. The groups were fixed before training.

Known limitations: only objects from the training data are recognized, and only if they differ from
the background color. To recognize two objects, the image is split in the middle.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

__all__ = ["BACKGROUNDS", "Judge", "Verdict", "load_judge"]

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]

# RGB values of the background colors in the training data.
BACKGROUNDS: dict[str, tuple[int, int, int]] = {
    "white": (255, 255, 255),
    "black": (16, 16, 16),
    "grey": (150, 150, 150),
    "red": (214, 40, 40),
    "orange": (247, 140, 30),
    "yellow": (250, 215, 60),
    "green": (60, 160, 70),
    "dark green": (16, 80, 40),
    "light green": (170, 225, 150),
    "blue": (40, 110, 220),
    "dark blue": (18, 32, 96),
    "light blue": (165, 215, 245),
    "purple": (125, 60, 175),
    "pink": (250, 170, 200),
    "brown": (115, 72, 42),
}

_FOLDER = Path(__file__).parent
_TILE = 48  # pixels of a glyph in glyphs.webp
_SIDE = 24  # pixels of a descriptor
_MIN_DIFFERENCE = 0.11  # of a pixel from the background, in units of the value range
_SHIFTS = (-0.03, 0.0, 0.03)
# Generated objects are slightly shifted and scaled, so each image is compared at several offsets (x, y, zoom).
_JITTER = tuple((dx, dy, zoom) for dx in _SHIFTS for dy in _SHIFTS for zoom in (0.95, 1.0, 1.06))
_NO_JITTER = ((0.0, 0.0, 1.0),)


@dataclass(frozen=True)
class Verdict:
    """The objects recognized in an image or in one of its halves."""

    names: tuple[str, ...]
    """Nearest objects, best first: `("red apple", "tomato", …)`; empty if the image shows nothing."""
    groups: tuple[int, ...]
    """Group of each object; objects of one group look the same."""
    distance: float
    """Root mean square difference from the nearest object, from 0 to 1."""


class Judge:
    """Recognizer for objects drawn by the embedded model: `load_judge().classify(image).names[0]`."""

    def __init__(self, glyphs: Array, names: list[str], groups: list[int]) -> None:
        self.glyphs, self.names, self.groups = glyphs, names, groups
        self._descriptors: dict[str, Array] = {}

    def background(self, image: Image.Image) -> str:
        """Return the name of the training background color that is closest to the color of the image border."""
        color = _border_color(_as_array(image)) * 255
        return min(BACKGROUNDS, key=lambda name: float(((np.asarray(BACKGROUNDS[name]) - color) ** 2).sum()))

    def classify(self, image: Image.Image, side: str = "whole", best: int = 5) -> Verdict:
        """Return the `best` most similar objects in the `whole` image, or in its `left` or `right` half."""
        distances = self._squared_distances(image, side)
        if distances is None:
            return Verdict((), (), 1.0)
        ranking = np.argsort(distances, kind="stable")[:best]
        names, groups = tuple(self.names[i] for i in ranking), tuple(self.groups[i] for i in ranking)
        return Verdict(names, groups, float(np.sqrt(distances[ranking[0]])))

    def distance(self, image: Image.Image, name: str) -> float:
        """Return the root mean square difference of an image from the object with this name, from 0 to 1."""
        distances = self._squared_distances(image, "whole", self.names.index(name))
        return 1.0 if distances is None else float(np.sqrt(distances[0]))

    def locate(self, image: Image.Image) -> tuple[float, float, float, float] | None:
        """Return the bounding box (top, left, bottom, right) of what differs from the background, in pixels."""
        pixels = _as_array(image)
        return _find_box(pixels, _border_color(pixels))

    def _squared_distances(self, image: Image.Image, side: str, index: int | None = None) -> Array | None:
        """Return the squared distance from every object, or from one; None if the image shows nothing."""
        pixels = _as_array(image)
        references = self._reference_descriptors(self.background(image))
        references = references if index is None else references[index : index + 1]
        background = _border_color(pixels)
        half = pixels.shape[1] // 2
        region = {"whole": pixels, "left": pixels[:, :half], "right": pixels[:, half:]}[side]
        box = _find_box(region, background)
        if box is None:
            return None
        crops = _crop(region, box, background, _JITTER).reshape(len(_JITTER), -1)
        flat = references.reshape(len(references), -1)
        # |a - b|² = |a|² - 2ab + |b|²: one matrix product instead of a difference for every pair.
        squared = (flat**2).sum(1)[None] - 2 * crops @ flat.T + (crops**2).sum(1)[:, None]
        distances: Array = np.maximum(squared, 0).min(0) / flat.shape[1]  # rounding can make a square negative
        return distances

    def _reference_descriptors(self, background: str) -> Array:
        """Return the descriptors (small square images) of all glyphs on a background color."""
        if background not in self._descriptors:
            color = np.asarray(BACKGROUNDS[background], np.float32) / 255
            self._descriptors[background] = np.stack([self._describe_glyph(glyph, color) for glyph in self.glyphs])
        return self._descriptors[background]

    @staticmethod
    def _describe_glyph(glyph: Array, color: Array) -> Array:
        """Return the descriptor (a small square image) of a glyph drawn on a background color."""
        alpha = glyph[..., 3:]
        # A margin of 8 pixels, because some glyphs touch the border of their tile.
        drawn = np.pad(glyph[..., :3] * alpha + color * (1 - alpha), ((8, 8), (8, 8), (0, 0)), constant_values=-1)
        drawn = np.where(drawn < 0, color, drawn).astype(np.float32)
        box = _find_box(drawn, color) or (8, 8, 8 + _TILE, 8 + _TILE)
        descriptor: Array = _crop(drawn, box, color, _NO_JITTER)[0]
        return descriptor


@functools.cache
def load_judge() -> Judge:
    """Return an object recognizer with the glyphs from the embedded model's training data."""
    things = json.loads((_FOLDER / "things.json").read_text(encoding="utf-8"))["things"]
    with Image.open(_FOLDER / "glyphs.webp") as sheet:
        pixels = np.asarray(sheet.convert("RGBA"), np.float32) / 255
    columns = pixels.shape[1] // _TILE
    corners = [(index // columns * _TILE, index % columns * _TILE) for index in range(len(things))]
    glyphs = np.stack([pixels[top : top + _TILE, left : left + _TILE] for top, left in corners])
    return Judge(glyphs, [thing["names"][0] for thing in things], [thing["group"] for thing in things])


def _as_array(image: Image.Image) -> Array:
    return np.asarray(image.convert("RGB"), np.float32) / 255


def _border_color(pixels: Array) -> Array:
    """Return the median color of the image's two-pixel border."""
    edge = [pixels[:2].reshape(-1, 3), pixels[-2:].reshape(-1, 3), pixels[:, :2].reshape(-1, 3)]
    color: Array = np.median(np.concatenate([*edge, pixels[:, -2:].reshape(-1, 3)]), axis=0)
    return color


def _find_box(pixels: Array, background: Array) -> tuple[float, float, float, float] | None:
    """Return the bounding box of the pixels that differ from the background, or None if there are none.

    The box is (top, left, bottom, right).
    """
    difference = np.abs(pixels - background).max(2)
    padded = np.pad(difference, 1, mode="edge")
    height, width = difference.shape
    # The mean over nine pixels suppresses noise and isolated pixels.
    neighbors = [padded[i : i + height, j : j + width] for i in range(3) for j in range(3)]
    mask = np.mean(neighbors, axis=0) > _MIN_DIFFERENCE
    rows, columns = np.flatnonzero(mask.sum(1) >= 2), np.flatnonzero(mask.sum(0) >= 2)
    if not len(rows) or not len(columns):
        return None
    return float(rows[0]), float(columns[0]), float(rows[-1] + 1), float(columns[-1] + 1)


def _crop(
    pixels: Array, box: tuple[float, float, float, float], background: Array, jitter: tuple[tuple[float, ...], ...]
) -> Array:
    """Crop a box to a square, and return one small resized copy per shift and zoom factor in `jitter`."""
    top, left, bottom, right = box
    longest = max(bottom - top, right - left)
    margin = int(longest) + 2
    height, width = pixels.shape[:2]
    canvas = np.empty((height + 2 * margin, width + 2 * margin, 3), np.float32)
    canvas[:] = background
    canvas[margin : margin + height, margin : margin + width] = pixels
    image = Image.fromarray((canvas * 255).round().astype(np.uint8))
    crops = []
    for shift_x, shift_y, zoom in jitter:
        side = longest * zoom
        x = (left + right) / 2 + shift_x * side - side / 2 + margin
        y = (top + bottom) / 2 + shift_y * side - side / 2 + margin
        crops.append(np.asarray(image.resize((_SIDE, _SIDE), Image.Resampling.BOX, box=(x, y, x + side, y + side))))
    return np.stack(crops).astype(np.float32) / 255
