"""Contact sheets of generated images, and of the frames of generated videos."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image

from anyaccel.errors import UsageError
from anyaccel.media.stills import make_contact_sheet, sample_frames
from anyaccel.media.types import Media, Video

__all__ = ["make_sheet"]

# Frames of a single video, and of each of several videos, which have one row each.
_FRAMES, _FRAMES_PER_ROW = 16, 8


def make_sheet(media: Sequence[Media], columns: int | None = None) -> Image.Image:
    """Return a contact sheet of images, or of evenly spaced frames of videos.

    `columns` is the number of images per row; videos have one row each.
    """
    images = [item for item in media if isinstance(item, Image.Image)]
    videos = [item for item in media if isinstance(item, Video)]
    if images:
        return make_contact_sheet(images, columns)
    if not videos:
        raise UsageError("audio has no contact sheet", hint="omit it for audio")
    if len(videos) == 1:
        return make_contact_sheet(sample_frames(videos[0], _FRAMES))
    rows = [sample_frames(video, _FRAMES_PER_ROW) for video in videos]
    return make_contact_sheet([frame for row in rows for frame in row], max(map(len, rows)))
