"""Still images of several images, of video and of audio."""

import numpy as np
import pytest
from PIL import Image

from anyaccel.media.stills import make_contact_sheet, make_spritesheet, make_thumbnail, make_waveform, sample_frames
from anyaccel.media.types import Audio, Video
from tests.media.samples import make_audio, make_frame, make_video


def make_numbered_video(frames: int) -> Video:
    return Video([Image.new("RGB", (32, 16), (index, 0, 0)) for index in range(frames)], 24)


def list_numbers(images: list[Image.Image]) -> list[int]:
    return [np.asarray(image)[0, 0, 0].item() for image in images]


@pytest.mark.parametrize(
    ("frames", "count", "expected"), [(9, 3, [1, 4, 7]), (100, 1, [50]), (3, 8, [0, 1, 2]), (81, 4, [10, 30, 50, 70])]
)
def test_sampled_frames_are_evenly_spaced(frames: int, count: int, expected: list[int]) -> None:
    assert list_numbers(sample_frames(make_numbered_video(frames), count)) == expected


def test_contact_sheet_has_rows_and_columns() -> None:
    images = [Image.new("RGB", (32, 32), (200, index, 0)) for index in range(5)]
    sheet = make_contact_sheet(images, columns=3)
    assert sheet.size == (3 * 34 + 2, 2 * 34 + 2)
    assert [sheet.getpixel((2 + 34 * (index % 3), 2 + 34 * (index // 3))) for index in range(5)] == [
        (200, index, 0) for index in range(5)
    ]


def test_thumbnails_have_at_most_the_given_size() -> None:
    assert make_thumbnail(make_frame(400, 100), 200).size == (200, 50)
    assert make_thumbnail(make_frame(40, 10).convert("RGBA"), 200).size == (40, 10)
    assert make_thumbnail(make_frame().convert("RGBA")).mode == "RGB"
    assert list_numbers([make_thumbnail(make_numbered_video(9))]) == [4]
    assert make_thumbnail(make_audio(), 64).size == (64, 16)


def test_spritesheet_contains_the_frames_row_by_row() -> None:
    sheet = make_spritesheet(make_numbered_video(6), columns=4, max_side=16)
    assert sheet.size == (4 * 16, 2 * 8)
    cells = [sheet.getpixel((16 * (index % 4) + 3, 8 * (index // 4) + 3)) for index in range(6)]
    assert cells == [(index, 0, 0) for index in range(6)]
    assert make_spritesheet(make_video(100, width=8, height=8), max_frames=10).size == (8 * 8, 2 * 8)


def test_waveform_shows_loud_and_silent_parts() -> None:
    samples = np.zeros((2, 1000), np.float32)
    samples[0, :500] = np.tile([1.0, -1.0], 250)
    image = np.asarray(make_waveform(Audio(samples, 1000), 100, 40), dtype=int)
    drawn = (image != image[0, -1]).any(axis=-1)
    assert drawn[:20, :50].mean() > 0.9
    assert drawn[:20, 50:].sum() == 50  # a line
    assert drawn[20:].sum() == 100


def test_waveform_of_few_samples() -> None:
    assert make_waveform(Audio(np.ones((1, 3), np.float32), 10), 64, 16).size == (64, 16)
