"""Preview of images, videos and audio in the terminal: an image, a few frames side by side, or a waveform."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from anyaccel.cli.terminal_image import show_image

if TYPE_CHECKING:
    from anyaccel.media.types import Media

__all__ = ["show_media"]

_FRAMES = 4


def show_media(media: Media, stream: TextIO, protocol: str = "auto") -> None:
    """Show an image, frames of a video or the waveform of audio if the stream is a terminal that can display images."""
    if not stream.isatty():
        return
    from anyaccel.media.stills import make_contact_sheet, make_waveform, sample_frames
    from anyaccel.media.types import Audio, Video

    if isinstance(media, Video):
        frames = sample_frames(media, _FRAMES)
        image = frames[0] if len(frames) == 1 else make_contact_sheet(frames, len(frames))
    else:
        image = make_waveform(media) if isinstance(media, Audio) else media
    show_image(image, stream, protocol)
