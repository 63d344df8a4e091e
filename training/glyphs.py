"""Drawing the glyphs: Noto Color Emoji (SIL OFL 1.1), 128 pixels wide, with alpha."""

from __future__ import annotations

import colorsys
import functools
from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont, features

__all__ = ["FONT", "GLYPH_PIXELS", "draw_glyph", "name_colour"]

FONT = Path("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf")
"""Where Debian's package fonts-noto-color-emoji puts it."""
GLYPH_PIXELS = 128
_MOST_OF_IT = 0.5
_HUES = ((18, "red"), (42, "orange"), (68, "yellow"), (165, "green"), (255, "blue"), (292, "purple"), (340, "pink"))
_BITMAP_SIZE = 109  # the one size in which the font has its pictures


@functools.cache
def _open_font(path: Path) -> ImageFont.FreeTypeFont:
    if not path.is_file():
        raise SystemExit(f"the font is not at {path}\nhint: apt install fonts-noto-color-emoji, or pass --font")
    assert features.check("freetype2")
    return ImageFont.truetype(str(path), _BITMAP_SIZE)


def draw_glyph(glyph: str, path: Path = FONT) -> np.ndarray | None:
    """One glyph, cropped to what is drawn and centred in a square, as RGBA; None where the font has none."""
    canvas = Image.new("RGBA", (3 * GLYPH_PIXELS, 3 * GLYPH_PIXELS))
    ImageDraw.Draw(canvas).text((GLYPH_PIXELS, GLYPH_PIXELS), glyph, font=_open_font(path), embedded_color=True)
    box = canvas.getchannel("A").point(lambda alpha: 255 if alpha > 8 else 0).getbbox()
    if box is None:
        return None
    drawn = canvas.crop(box)
    scale = GLYPH_PIXELS / max(drawn.size)
    wide, high = (max(1, round(side * scale)) for side in drawn.size)
    # Premultiplied, so that what is transparent lends no colour to the edge.
    square = Image.new("RGBa", (GLYPH_PIXELS, GLYPH_PIXELS))
    place = ((GLYPH_PIXELS - wide) // 2, (GLYPH_PIXELS - high) // 2)
    square.paste(drawn.convert("RGBa").resize((wide, high), Image.Resampling.LANCZOS), place)
    return np.asarray(square.convert("RGBA"))


def name_colour(glyph: np.ndarray) -> str | None:
    """The colour that more than half of a glyph has, by name; None where it has several."""
    colours = [
        _name_pixel(*(float(level) / 255 for level in pixel[:3]))
        for pixel in glyph[::4, ::4].reshape(-1, 4)
        if pixel[3] > 128
    ]
    name, times = Counter(colours).most_common(1)[0] if colours else ("", 0)
    return name if times > _MOST_OF_IT * len(colours) else None


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
    return next((name for most, name in _HUES if degrees < most), "red")
