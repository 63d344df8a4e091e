"""The contact sheet: several pictures on one."""

from __future__ import annotations

import math
from collections.abc import Sequence

from PIL import Image

__all__ = ["make_contact_sheet"]

_BACKGROUND = (24, 24, 27)
_GAP_SHARE = 32
"""The gap is one part in so many of a picture's longer side."""


def make_contact_sheet(images: Sequence[Image.Image], columns: int | None = None) -> Image.Image:
    """Lay pictures out from left to right and from top to bottom, as near to a square as they go."""
    width = max(image.width for image in images)
    height = max(image.height for image in images)
    gap = max(2, max(width, height) // _GAP_SHARE)
    columns = columns or math.ceil(math.sqrt(len(images) * height / width))
    columns = max(1, min(columns, len(images)))
    rows = math.ceil(len(images) / columns)
    sheet = Image.new("RGB", (columns * (width + gap) + gap, rows * (height + gap) + gap), _BACKGROUND)
    for place, image in enumerate(images):
        row, column = divmod(place, columns)
        left = gap + column * (width + gap) + (width - image.width) // 2
        top = gap + row * (height + gap) + (height - image.height) // 2
        sheet.paste(image.convert("RGB"), (left, top))
    return sheet
