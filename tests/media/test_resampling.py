"""Conversion of audio to another sampling rate."""

import sys

import numpy
import pytest

from anyaccel.errors import MissingLibraryError, UsageError
from anyaccel.media.resampling import convert_channels, resample
from anyaccel.media.types import Audio


def make_tone(rate: int, channels: int, seconds: float = 0.5) -> Audio:
    time = numpy.arange(round(rate * seconds)) / rate
    tones = [0.5 * numpy.sin(2 * numpy.pi * 440 * (channel + 1) * time) for channel in range(channels)]
    return Audio(numpy.array(tones, dtype=numpy.float32), rate)


@pytest.mark.parametrize(("rate", "new_rate"), [(16_000, 44_100), (44_100, 48_000), (48_000, 16_000), (48_000, 48_000)])
@pytest.mark.parametrize("channels", [1, 2, 3])
def test_a_tone_stays_the_same(rate: int, new_rate: int, channels: int) -> None:
    converted, expected = resample(make_tone(rate, channels), new_rate), make_tone(new_rate, channels)
    assert converted.rate == new_rate
    assert converted.samples.shape == expected.samples.shape
    # The first and last samples depend on what is before and after the audio.
    inner = slice(new_rate // 20, -new_rate // 20)
    assert abs(converted.samples - expected.samples)[:, inner].max() < 0.005


@pytest.mark.parametrize(("rate", "new_rate"), [(192_000, 8_000), (50, 100), (8_000, 192_000)])
@pytest.mark.parametrize("length", [1, 10, 1000])
def test_short_audio_is_not_lost(rate: int, new_rate: int, length: int) -> None:
    converted = resample(Audio(numpy.ones((1, length), dtype=numpy.float32), rate), new_rate).samples
    assert converted.shape == (1, max(1, round(length * new_rate / rate)))
    assert converted.max() > 0


def test_without_pyav_the_error_names_both_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    assert resample(make_tone(16_000, 1), 16_000).rate == 16_000
    with pytest.raises(MissingLibraryError, match=r"16,000 to 44,100(.|\n)*PyAV") as caught:
        resample(make_tone(16_000, 1), 44_100)
    assert caught.value.hint == "pip install 'anyaccel[video]'"


def test_mono_and_stereo() -> None:
    mono = Audio(numpy.array([[0.5, -0.5]], numpy.float32), 8000)
    stereo = convert_channels(mono, 2)
    assert stereo.samples.tolist() == [[0.5, -0.5]] * 2
    assert stereo.rate == 8000
    assert convert_channels(stereo, 1).samples.tolist() == mono.samples.tolist()
    assert convert_channels(stereo, 2) is stereo
    with pytest.raises(UsageError, match="the audio has 2 channels, and the model takes 4"):
        convert_channels(stereo, 4)
