"""Audio files: WAV and FLAC with 16 bits per sample."""

from __future__ import annotations

import io
from typing import BinaryIO

import numpy as np

from anyaccel.errors import UsageError
from anyaccel.media.formats import SUFFIXES
from anyaccel.media.types import Audio, EmbeddedMetadata

__all__ = [
    "MAX_CHANNELS",
    "MAX_RATE",
    "check_audio_size",
    "check_samples",
    "decode_audio_file",
    "encode_audio",
    "read_flac_document",
]

MAX_CHANNELS = 8
MAX_RATE = 192_000
"""Largest number of samples per second."""

# libsndfile skips longer comments when it reads a WAV file.
_MAX_WAV_COMMENT_BYTES = 2000


def check_samples(audio: Audio) -> None:
    """Raise `UsageError` if audio cannot be written to a file."""
    channels = audio.samples.shape[0]
    if channels > MAX_CHANNELS or audio.rate > MAX_RATE:
        raise UsageError(
            f"audio files can have at most {MAX_CHANNELS} channels and {MAX_RATE:,} samples per second, not {channels} "
            f"channels and {audio.rate:,} samples per second",
            hint="pass samples of shape (channels, samples)",
        )
    if not np.isfinite(audio.samples).all():
        raise UsageError("the audio samples contain NaN or Inf", hint="generate the audio in float32")


def encode_audio(audio: Audio, suffix: str, metadata: EmbeddedMetadata) -> bytes:
    """Return the bytes of a WAV or FLAC file.

    A file has one comment: the document, if the format can contain it, or else `comment`, which is shortened in WAV
    files. Samples outside of the range from -1 to 1 are clipped.
    """
    import soundfile

    check_samples(audio)
    file_format = SUFFIXES[suffix.lower()]
    text = metadata.comment or ""
    if file_format.embeds_metadata:
        text = metadata.document or text
    else:
        # The comment is a C string, and libsndfile rejects an empty one.
        text = text.replace("\0", "").encode()[:_MAX_WAV_COMMENT_BYTES].decode(errors="ignore")
    stream = io.BytesIO()
    container = file_format.suffix[1:].upper()
    with soundfile.SoundFile(
        stream, "w", audio.rate, audio.samples.shape[0], format=container, subtype="PCM_16"
    ) as file:
        if text:
            file.comment = text
        # soundfile would multiply by 32,767 and divide by 32,768 when it reads the file.
        file.write(np.clip(np.rint(audio.samples.T * 32768), -32768, 32767).astype(np.int16))
    return stream.getvalue()


def check_audio_size(name: str, channels: int, rate: int, samples: int, max_seconds: float) -> None:
    """Raise `UsageError` if the audio in a file is too long or has too many channels."""
    if not 1 <= channels <= MAX_CHANNELS or not 1 <= rate <= MAX_RATE:
        raise UsageError(
            f"{name} has {channels} channels and {rate:,} samples per second, and audio files can have at most "
            f"{MAX_CHANNELS} channels and {MAX_RATE:,} samples per second",
            hint="convert the audio to stereo with 48,000 samples per second",
        )
    if samples > max_seconds * rate:
        raise UsageError(
            f"the audio in {name} is longer than {max_seconds:g} seconds", hint="use a shorter part of the audio"
        )


def decode_audio_file(file: BinaryIO, name: str, *, max_seconds: float) -> Audio:
    """Return the audio in a WAV or FLAC file."""
    import soundfile

    is_complete = _is_complete(file)
    try:
        with soundfile.SoundFile(file) as sound:
            expected, rate = int(sound.frames), int(sound.samplerate)
            check_audio_size(name, sound.channels, rate, expected, max_seconds)
            samples = sound.read(expected, dtype="float32", always_2d=True)
    except soundfile.SoundFileError as error:
        raise UsageError(f"{name} is damaged: {error}", hint="copy or download the file again") from error
    if not samples.size or len(samples) < expected or not is_complete:
        raise UsageError(f"{name} is truncated or contains no audio", hint="copy or download the file again")
    audio = Audio(np.ascontiguousarray(samples.T, dtype=np.float32), rate)
    check_samples(audio)  # WAV files can contain floating-point samples
    return audio


def _is_complete(file: BinaryIO) -> bool:
    """Return whether a WAV file is as long as its header says; libsndfile ignores missing samples."""
    header = file.read(12)
    end = file.seek(0, io.SEEK_END)
    file.seek(0)
    declared = int.from_bytes(header[4:8], "little")
    # Programs that write to a pipe do not know the size, and write 0 or 2**32 - 1.
    return header[:4] != b"RIFF" or declared in (0, 2**32 - 1) or declared + 8 <= end


def read_flac_document(file: BinaryIO, name: str) -> str | None:
    """Return the metadata document in a FLAC file; None if it has none."""
    import soundfile

    try:
        with soundfile.SoundFile(file) as sound:
            comment = str(sound.comment)
    except soundfile.SoundFileError as error:
        raise UsageError(f"{name} is damaged: {error}", hint="copy or download the file again") from error
    return comment if comment.startswith("{") else None
