"""What is on a picture of the embedded model, by comparison with the glyphs it was trained on: no other model needed.

A picture is judged in three steps. The median colour of its border is the background, named by the nearest of the
colours that were trained. What differs from the background is cropped and scaled to a small square. The nearest square,
out of the known glyphs drawn on that background and cropped in the same way, is the answer. Glyphs that cannot be told
apart like this when they are drawn count as one: they share a group, and the groups were written down before training.

Known limitations: it names what the model was trained on and nothing else; a thing that has the background's colour all
over is not seen; two things are told apart by the halves of the picture.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

__all__ = ["BACKGROUNDS", "Judge", "Verdict", "open_judge"]

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]

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
"""The colours that a background can have, by name."""

_FOLDER = Path(__file__).parent
_TILE = 48  # pixels of a glyph in the sheet
_SIDE = 24  # pixels of a descriptor
_DIFFERS = 0.11  # how far from the background a pixel is before it belongs to a thing, of 1
_JITTER = tuple((dx, dy, zoom) for dx in (-0.03, 0.0, 0.03) for dy in (-0.03, 0.0, 0.03) for zoom in (0.95, 1.0, 1.06))

_STILL = ((0.0, 0.0, 1.0),)


@dataclass(frozen=True)
class Verdict:
    """What the judge saw in a picture or in one half of it."""

    names: tuple[str, ...]
    """The nearest things, best first: `("red apple", "tomato", …)`; empty where there is nothing."""
    groups: tuple[int, ...]
    """The group of each; equal numbers are things that look the same."""
    distance: float
    """Root mean square difference from the nearest, of 1."""


class Judge:
    """Names what is on a picture: `open_judge().look(picture).names[0]`."""

    def __init__(self, glyphs: Array, names: list[str], groups: list[int]) -> None:
        self.glyphs, self.names, self.groups = glyphs, names, groups
        self._known: dict[str, Array] = {}

    def background(self, picture: Image.Image) -> str:
        """The name of the background's colour."""
        colour = _border(_as_array(picture)) * 255
        return min(BACKGROUNDS, key=lambda name: float(((np.asarray(BACKGROUNDS[name]) - colour) ** 2).sum()))

    def look(self, picture: Image.Image, side: str = "whole", best: int = 5) -> Verdict:
        """The things nearest to what is on the picture, on its left or on its right half."""
        pixels = _as_array(picture)
        known = self._drawn_on(self.background(picture))
        background = _border(pixels)
        half = pixels.shape[1] // 2
        part = {"whole": pixels, "left": pixels[:, :half], "right": pixels[:, half:]}[side]
        box = _find_box(part, background)
        if box is None:
            return Verdict((), (), 1.0)
        crops = _crops(part, box, background, _JITTER).reshape(len(_JITTER), -1)
        flat = known.reshape(len(known), -1)
        squared = (flat**2).sum(1)[None] - 2 * crops @ flat.T + (crops**2).sum(1)[:, None]
        nearest = np.maximum(squared, 0).min(0) / flat.shape[1]
        order = np.argsort(nearest, kind="stable")[:best]
        names, groups = tuple(self.names[i] for i in order), tuple(self.groups[i] for i in order)
        return Verdict(names, groups, float(np.sqrt(nearest[order[0]])))

    def group_of(self, name: str) -> int:
        """The group of a thing that was trained."""
        return self.groups[self.names.index(name)]

    def _drawn_on(self, background: str) -> Array:
        """Every glyph drawn on a background and cropped as a picture is."""
        if background not in self._known:
            colour = np.asarray(BACKGROUNDS[background], np.float32) / 255
            self._known[background] = np.stack([self._draw(glyph, colour) for glyph in self.glyphs])
        return self._known[background]

    @staticmethod
    def _draw(glyph: Array, colour: Array) -> Array:
        alpha = glyph[..., 3:]
        drawn = np.pad(glyph[..., :3] * alpha + colour * (1 - alpha), ((8, 8), (8, 8), (0, 0)), constant_values=-1)
        drawn = np.where(drawn < 0, colour, drawn).astype(np.float32)
        box = _find_box(drawn, colour) or (8, 8, 8 + _TILE, 8 + _TILE)
        descriptor: Array = _crops(drawn, box, colour, _STILL)[0]
        return descriptor


@functools.cache
def open_judge() -> Judge:
    """The judge with the glyphs that ship with the model."""
    listed = json.loads((_FOLDER / "things.json").read_text(encoding="utf-8"))["things"]
    with Image.open(_FOLDER / "glyphs.webp") as sheet:
        pixels = np.asarray(sheet.convert("RGBA"), np.float32) / 255
    columns = pixels.shape[1] // _TILE
    places = [(index // columns * _TILE, index % columns * _TILE) for index in range(len(listed))]
    glyphs = np.stack([pixels[top : top + _TILE, left : left + _TILE] for top, left in places])
    return Judge(glyphs, [thing["names"][0] for thing in listed], [thing["group"] for thing in listed])


def _as_array(picture: Image.Image) -> Array:
    return np.asarray(picture.convert("RGB"), np.float32) / 255


def _border(pixels: Array) -> Array:
    edge = [pixels[:2].reshape(-1, 3), pixels[-2:].reshape(-1, 3), pixels[:, :2].reshape(-1, 3)]
    colour: Array = np.median(np.concatenate([*edge, pixels[:, -2:].reshape(-1, 3)]), axis=0)
    return colour


def _find_box(pixels: Array, background: Array) -> tuple[float, float, float, float] | None:
    """What differs from the background, as top, left, bottom and right; faint or lone pixels do not count."""
    differs = np.abs(pixels - background).max(2)
    padded = np.pad(differs, 1, mode="edge")
    high, wide = differs.shape
    around = [padded[i : i + high, j : j + wide] for i in range(3) for j in range(3)]
    mask = np.mean(around, axis=0) > _DIFFERS
    rows, columns = np.flatnonzero(mask.sum(1) >= 2), np.flatnonzero(mask.sum(0) >= 2)
    if not len(rows) or not len(columns):
        return None
    return float(rows[0]), float(columns[0]), float(rows[-1] + 1), float(columns[-1] + 1)


def _crops(
    pixels: Array, box: tuple[float, float, float, float], background: Array, moves: tuple[tuple[float, ...], ...]
) -> Array:
    """The box, made square around its middle, a little moved, at the descriptor's size; outside is background."""
    top, left, bottom, right = box
    longest = max(bottom - top, right - left)
    margin = int(longest) + 2
    high, wide = pixels.shape[:2]
    canvas = np.empty((high + 2 * margin, wide + 2 * margin, 3), np.float32)
    canvas[:] = background
    canvas[margin : margin + high, margin : margin + wide] = pixels
    image = Image.fromarray((canvas * 255).round().astype(np.uint8))
    made = []
    for shift_x, shift_y, zoom in moves:
        side = longest * zoom
        x = (left + right) / 2 + shift_x * side - side / 2 + margin
        y = (top + bottom) / 2 + shift_y * side - side / 2 + margin
        made.append(np.asarray(image.resize((_SIDE, _SIDE), Image.Resampling.BOX, box=(x, y, x + side, y + side))))
    return np.stack(made).astype(np.float32) / 255
