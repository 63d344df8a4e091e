"""Contact sheets: several images in a grid."""

from __future__ import annotations

import math
from collections.abc import Sequence

from PIL import Image

__all__ = ["make_contact_sheet"]

_BACKGROUND = (24, 24, 27)
# The gap between images is the longer side of the largest image divided by this.
_GAP_DIVISOR = 32


def make_contact_sheet(images: Sequence[Image.Image], columns: int | None = None) -> Image.Image:
    """Arrange images in a grid, row by row, and return the contact sheet.

    Without `columns`, the sheet is as close to square as possible.
    """
    # Images of one call have the same size; images regenerated from several files may not.
    width = max(image.width for image in images)
    height = max(image.height for image in images)
    gap = max(2, max(width, height) // _GAP_DIVISOR)
    columns = columns or math.ceil(math.sqrt(len(images) * height / width))
    columns = max(1, min(columns, len(images)))
    rows = math.ceil(len(images) / columns)
    sheet = Image.new("RGB", (columns * (width + gap) + gap, rows * (height + gap) + gap), _BACKGROUND)
    for index, image in enumerate(images):
        row, column = divmod(index, columns)
        left = gap + column * (width + gap) + (width - image.width) // 2
        top = gap + row * (height + gap) + (height - image.height) // 2
        sheet.paste(image.convert("RGB"), (left, top))
    return sheet
