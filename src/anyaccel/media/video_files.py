"""Video files: MP4 with H.264 and AAC, and WebM with VP9 and Opus, encoded by PyAV."""

from __future__ import annotations

import io
from fractions import Fraction
from typing import TYPE_CHECKING, cast

import numpy as np

from anyaccel.errors import UsageError
from anyaccel.media.audio_files import check_samples
from anyaccel.media.formats import SUFFIXES, Format
from anyaccel.media.image_files import DOCUMENT_KEY
from anyaccel.media.libraries import find_encoder
from anyaccel.media.types import Audio, EmbeddedMetadata, OnFrame, Video

if TYPE_CHECKING:
    from av import AudioStream, VideoFrame, VideoStream
    from av.container import OutputContainer
    from PIL import Image

__all__ = ["EXACT_CONVERSION", "encode_video"]

_MUXERS = {".mp4": "mp4", ".webm": "webm"}
_MUXER_OPTIONS = {
    # The index at the start of the file, so that browsers play it while they load it; keys other than iTunes's.
    ".mp4": {"movflags": "+faststart+use_metadata_tags"},
    ".webm": {},
}
# Without the FFmpeg version, timestamps and random identifiers, and with interleaved video and audio.
_COMMON_OPTIONS = {"fflags": "+bitexact", "max_interleave_delta": "0"}
# The output of the encoders depends on the number of threads, so it must not depend on the machine.
_THREADS = 4
# For each encoder: the constant rate factor (CRF) at quality 95, its increase for each unit of quality below, and the
# largest CRF.
_CRF = {"libx264": (16, 0.4, 51), "libvpx-vp9": (20, 0.45, 63), "libsvtav1": (20, 0.45, 63)}
_REFERENCE_QUALITY = 95
_ENCODER_OPTIONS = {
    # Without `cpu-independent`, the output differs between CPUs and, for small frames on CPUs with AVX-512, also
    # between runs (seen with x264 165 in PyAV 18.1).
    "libx264": {"preset": "medium", "x264-params": "cpu-independent=1"},
    "libvpx-vp9": {"b": "0", "deadline": "good", "cpu-used": "4", "tile-columns": "2", "row-mt": "0"},
    "libsvtav1": {"preset": "8"},
}
# FFmpeg's default method of AAC starts with too few bits: the first 40 ms had an error of 0.4.
_AUDIO_OPTIONS = {"aac": {"aac_coder": "fast"}, "libopus": {}}
_AUDIO_BITS_PER_SECOND = 256_000
# For sample rates that a codec does not support. Opus supports only a few.
_COMMON_RATE = 48_000
_LAYOUTS = {1: "mono", 2: "stereo"}
EXACT_CONVERSION = 0x4 | 0x2000 | 0x4000 | 0x40000 | 0x80000
"""Flags of libswscale: bicubic, full_chroma_int, full_chroma_inp, accurate_rnd and bitexact.

The names are not available in PyAV 17.
"""

_BT709, _LIMITED_RANGE = 1, 1  # values of AVColorSpace, AVColorPrimaries, AVColorTransferCharacteristic; AVColorRange
# Frame rates are fractions in video files: 23.976 is 2997/125, and 24000/1001 is preserved.
_LARGEST_DENOMINATOR = 100_000


def encode_video(
    video: Video, suffix: str, metadata: EmbeddedMetadata, quality: int, on_frame: OnFrame | None
) -> bytes:
    """Return the bytes of an MP4 or WebM file.

    The color format has one color value for four pixels, so frames with an odd width or height are padded by one column
    or row, which repeats the last one.
    """
    import av

    file_format = SUFFIXES[suffix.lower()]
    stream = io.BytesIO()
    with av.open(
        stream,
        "w",
        format=_MUXERS[file_format.suffix],
        options=_COMMON_OPTIONS | _MUXER_OPTIONS[file_format.suffix],
        # For `faststart`, FFmpeg opens the output again to read it.
        io_open=lambda url, flags, options: io.BytesIO(stream.getvalue()),
    ) as container:
        texts = {DOCUMENT_KEY: metadata.document, "comment": metadata.comment}
        container.metadata.update({key: text for key, text in texts.items() if text is not None})
        video_stream = _add_video_stream(container, video, file_format, quality)
        if video.audio is not None:
            _encode_audio_track(container, video.audio, file_format)
        total = len(video)
        for index, image in enumerate(video.frames):
            frame = _convert_frame(image)
            frame.pts, frame.time_base = index, 1 / _frame_rate(video)
            container.mux(video_stream.encode(frame))
            if on_frame is not None:
                on_frame(index + 1, total)
        container.mux(video_stream.encode(None))
    return stream.getvalue()


def _frame_rate(video: Video) -> Fraction:
    return Fraction(video.fps).limit_denominator(_LARGEST_DENOMINATOR)


def _add_video_stream(container: OutputContainer, video: Video, file_format: Format, quality: int) -> VideoStream:
    encoder = find_encoder(file_format.video_encoders, f"{file_format.suffix} files")
    reference, slope, largest = _CRF[encoder]
    crf = min(largest, max(0, round(reference + slope * (_REFERENCE_QUALITY - quality))))
    options = {"crf": str(crf), **_ENCODER_OPTIONS[encoder]}
    stream = cast("VideoStream", container.add_stream(encoder, rate=_frame_rate(video), options=options))
    stream.width, stream.height = video.width + video.width % 2, video.height + video.height % 2
    stream.pix_fmt = "yuv420p"
    context = stream.codec_context
    context.thread_count = _THREADS
    context.colorspace = context.color_primaries = context.color_trc = _BT709
    context.color_range = _LIMITED_RANGE
    return stream


def _convert_frame(image: Image.Image) -> VideoFrame:
    """Return an RGB image in the color format of the encoders, with even sides."""
    from av import VideoFrame

    pixels = np.asarray(image)
    height, width = pixels.shape[:2]
    if height % 2 or width % 2:
        pixels = np.pad(pixels, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    return VideoFrame.from_ndarray(pixels, format="rgb24").reformat(
        format="yuv420p",
        dst_colorspace=_BT709,
        dst_color_range=_LIMITED_RANGE,
        dst_color_trc=_BT709,
        dst_color_primaries=_BT709,
        interpolation=EXACT_CONVERSION,
        threads=1,
    )


def _encode_audio_track(container: OutputContainer, audio: Audio, file_format: Format) -> None:
    import av

    check_samples(audio)
    channels = audio.samples.shape[0]
    if channels not in _LAYOUTS:
        raise UsageError(
            f"the audio track of a video can have one or two channels, not {channels}",
            hint="convert the audio to stereo, or write it to a .wav file",
        )
    encoder = cast("str", file_format.audio_encoder)
    rates = av.codec.Codec(encoder, "w").audio_rates
    rate = audio.rate if rates is None or audio.rate in rates else _COMMON_RATE
    layout, options = _LAYOUTS[channels], _AUDIO_OPTIONS[encoder]
    stream = cast("AudioStream", container.add_stream(encoder, rate, options, layout=layout))
    stream.bit_rate = _AUDIO_BITS_PER_SECOND
    container.start_encoding()  # opens the encoder, which then knows its frame size
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(audio.samples.clip(-1, 1)), format="fltp", layout=layout)
    frame.sample_rate, frame.pts = audio.rate, 0
    resampler = av.AudioResampler(stream.format, stream.layout, rate, stream.frame_size or None)
    for part in [*resampler.resample(frame), *resampler.resample(None)]:
        container.mux(stream.encode(part))
    container.mux(stream.encode(None))
