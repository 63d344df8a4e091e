"""Still images of several images, of video and of audio: contact sheets, thumbnails, sprite sheets and waveforms."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

from anyaccel.media.types import Audio, Media, Video

__all__ = ["make_contact_sheet", "make_spritesheet", "make_thumbnail", "make_waveform", "sample_frames"]

_BACKGROUND, _WAVE = (24, 24, 27), (45, 212, 191)
# Width of the thumbnail of audio divided by its height.
_WAVEFORM_ASPECT = 4
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


def sample_frames(video: Video, count: int) -> list[Image.Image]:
    """Return evenly spaced frames of a video: the middle of each of `count` equal parts; all frames if it has fewer."""
    count = min(count, len(video))
    return [video.frames[int((index + 0.5) * len(video) / count)] for index in range(count)]


def make_thumbnail(media: Media, max_side: int = 512) -> Image.Image:
    """Return an RGB image of at most `max_side` pixels per side: the image, the middle frame or the waveform."""
    if isinstance(media, Audio):
        return make_waveform(media, max_side, max(1, max_side // _WAVEFORM_ASPECT))
    image = sample_frames(media, 1)[0] if isinstance(media, Video) else media
    thumbnail = image.convert("RGB")
    thumbnail.thumbnail((max_side, max_side), Image.Resampling.LANCZOS)
    return thumbnail


def make_spritesheet(video: Video, columns: int = 8, max_side: int = 160, max_frames: int = 64) -> Image.Image:
    """Arrange small copies of evenly spaced frames in a grid without gaps, row by row.

    Pages that show a preview of the video move a window over the sheet. All cells have the same size.
    """
    cells = [make_thumbnail(frame, max_side) for frame in sample_frames(video, max_frames)]
    width, height = cells[0].size
    columns = max(1, min(columns, len(cells)))
    sheet = Image.new("RGB", (columns * width, math.ceil(len(cells) / columns) * height), _BACKGROUND)
    for index, cell in enumerate(cells):
        row, column = divmod(index, columns)
        sheet.paste(cell, (column * width, row * height))
    return sheet


def make_waveform(audio: Audio, width: int = 512, height: int = 128) -> Image.Image:
    """Draw the smallest and largest sample of each column of an image; channels are below each other."""
    image = Image.new("RGB", (width, height), _BACKGROUND)
    draw = ImageDraw.Draw(image)
    channels, length = audio.samples.shape
    edges = np.linspace(0, length, width + 1).astype(int)
    for channel, samples in enumerate(audio.samples.clip(-1, 1)):
        center = (channel + 0.5) * height / channels
        amplitude = max(0, height // channels // 2 - 1)
        for column, (start, end) in enumerate(itertools.pairwise(edges)):
            # With fewer samples than columns, several columns show the same sample.
            part = samples[start : max(end, start + 1)]
            draw.line((column, center - amplitude * part.max(), column, center - amplitude * part.min()), fill=_WAVE)
    return image
