"""Conversion of audio to another sampling rate, with PyAV, and between mono and stereo."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np

from anyaccel.errors import UsageError
from anyaccel.media.libraries import require_extra
from anyaccel.media.types import Audio

__all__ = ["convert_channels", "resample"]

_Samples: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]
# Silence after the audio, in samples at the lower rate; more than half of the filter.
_PADDING = 64


def convert_channels(audio: Audio, channels: int) -> Audio:
    """Return mono audio in each of `channels` channels, and the mean of several channels as mono.

    Raise UsageError for other conversions, such as from six channels to two.
    """
    found = len(audio.samples)
    if found == channels:
        return audio
    if found != 1 and channels != 1:
        raise UsageError(
            f"the audio has {found} channels, and the model takes {channels}", hint="convert it to mono or stereo"
        )
    samples = audio.samples.mean(0, keepdims=True) if channels == 1 else np.repeat(audio.samples, channels, axis=0)
    return Audio(samples, audio.rate)


def resample(audio: Audio, rate: int) -> Audio:
    """Return audio with `rate` samples per second; raise `MissingLibraryError` if this requires PyAV."""
    if audio.rate == rate:
        return audio
    require_extra("video", f"conversions of audio from {audio.rate:,} to {rate:,} samples per second (the model's)")
    length = max(1, round(audio.samples.shape[1] * rate / audio.rate))
    # One channel at a time: PyAV has names for the layouts of some numbers of channels only.
    channels = [np.concatenate([*_resample(channel, audio.rate, rate)])[:length] for channel in audio.samples]
    return Audio(np.stack(channels), rate)


def _resample(channel: _Samples, rate: int, new_rate: int) -> Iterator[_Samples]:
    import av

    # PyAV returns nothing for fewer samples than its filter needs.
    padded = np.pad(channel, (0, _PADDING * (1 + rate // new_rate)))
    frame = av.AudioFrame.from_ndarray(padded[None], format="fltp", layout="mono")
    frame.sample_rate, frame.pts = rate, 0
    resampler = av.AudioResampler("fltp", "mono", new_rate)
    for part in (*resampler.resample(frame), *resampler.resample(None)):
        yield part.to_ndarray()[0].astype(np.float32, copy=False)
