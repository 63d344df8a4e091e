"""Glyphs of Noto Color Emoji (SIL OFL 1.1) as 128 x 128 RGBA images."""

from __future__ import annotations

import colorsys
import functools
from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont, features

__all__ = ["FONT", "GLYPH_PIXELS", "draw_glyph", "name_color"]

FONT = Path("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf")
"""Path of the font in Debian's package fonts-noto-color-emoji."""
GLYPH_PIXELS = 128
_MIN_FRACTION = 0.5
_HUES = ((18, "red"), (42, "orange"), (68, "yellow"), (165, "green"), (255, "blue"), (292, "purple"), (340, "pink"))
_BITMAP_SIZE = 109  # the only bitmap size of the font


@functools.cache
def _open_font(path: Path) -> ImageFont.FreeTypeFont:
    if not path.is_file():
        raise SystemExit(f"font not found: {path}\nhint: apt install fonts-noto-color-emoji, or pass --font")
    assert features.check("freetype2")
    return ImageFont.truetype(str(path), _BITMAP_SIZE)


def draw_glyph(glyph: str, path: Path = FONT) -> np.ndarray | None:
    """Return a glyph cropped and centered in a square, as RGBA; None if the font does not have it."""
    canvas = Image.new("RGBA", (3 * GLYPH_PIXELS, 3 * GLYPH_PIXELS))
    ImageDraw.Draw(canvas).text((GLYPH_PIXELS, GLYPH_PIXELS), glyph, font=_open_font(path), embedded_color=True)
    box = canvas.getchannel("A").point(lambda alpha: 255 if alpha > 8 else 0).getbbox()
    if box is None:
        return None
    cropped = canvas.crop(box)
    scale = GLYPH_PIXELS / max(cropped.size)
    width, height = (max(1, round(side * scale)) for side in cropped.size)
    # Premultiplied alpha: transparent pixels must not tint the edges when resizing.
    square = Image.new("RGBa", (GLYPH_PIXELS, GLYPH_PIXELS))
    corner = ((GLYPH_PIXELS - width) // 2, (GLYPH_PIXELS - height) // 2)
    square.paste(cropped.convert("RGBa").resize((width, height), Image.Resampling.LANCZOS), corner)
    return np.asarray(square.convert("RGBA"))


def name_color(glyph: np.ndarray) -> str | None:
    """Return the name of the color of more than half of a glyph; None if there is no such color."""
    colors = [
        _name_pixel(*(float(level) / 255 for level in pixel[:3]))
        for pixel in glyph[::4, ::4].reshape(-1, 4)
        if pixel[3] > 128
    ]
    name, count = Counter(colors).most_common(1)[0] if colors else ("", 0)
    return name if count > _MIN_FRACTION * len(colors) else None


def _name_pixel(red: float, green: float, blue: float) -> str:
    hue, saturation, value = colorsys.rgb_to_hsv(red, green, blue)
    if value < 0.2:
        return "black"
    if saturation < 0.15:
        return "white" if value > 0.85 else "grey"
    degrees = hue * 360
    if 12 < degrees < 42 and value < 0.7:
        return "brown"
    if (degrees > 330 and saturation < 0.6) or (degrees > 340 and value > 0.9 and saturation < 0.7):
        return "pink"
    return next((name for limit, name in _HUES if degrees < limit), "red")
