"""Decoding untrusted MP4 and WebM files with PyAV."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from PIL import Image

from anyaccel.errors import UsageError
from anyaccel.media.audio_files import check_audio_size
from anyaccel.media.image_files import DOCUMENT_KEY
from anyaccel.media.source import COPY_AGAIN
from anyaccel.media.types import Audio, Video
from anyaccel.media.video_files import EXACT_CONVERSION

if TYPE_CHECKING:
    from av import AudioStream, Packet, VideoFrame, VideoStream
    from av.container import InputContainer

__all__ = ["decode_audio_track", "decode_video_file", "read_video_document"]

_DEMUXERS = {".mp4": "mov,mp4,m4a,3gp,3g2,mj2", ".webm": "matroska,webm"}
# Of FFmpeg's hundreds of decoders, only those of codecs that are common in these files.
_CODECS = frozenset({"h264", "hevc", "vp8", "vp9", "av1", "aac", "opus", "vorbis", "flac", "mp3", "pcm_s16le"})
_DECODERS = [*sorted(_CODECS), "libdav1d", "libvpx", "libvpx-vp9", "libopus", "libvorbis", "mp3float"]
_MAX_FPS = 1000
# Enough for the header element and the size of the segment element.
_WEBM_HEADER_BYTES = 1024
# The audio track may be longer than the frames by this.
_EXTRA_AUDIO_SECONDS = 10.0
_UNSPECIFIED = 2  # AVColorSpace
_BT601, _BT709 = 5, 1
# Players assume BT.709 from this height if the file does not say.
_HD_HEIGHT = 720


@contextmanager
def _open_container(file: BinaryIO, suffix: str, name: str) -> Iterator[InputContainer]:
    """Open a file; errors of PyAV in the `with` block, which damaged files cause, become `UsageError`."""
    import av

    if suffix == ".webm":
        _check_segment_size(file, name)
    options = {"codec_whitelist": ",".join(_DECODERS), "protocol_whitelist": "none"}
    try:
        with av.open(file, "r", format=_DEMUXERS[suffix], options=options, metadata_errors="replace") as container:
            yield container
    except av.FFmpegError as error:
        raise UsageError(f"{name} is damaged: {error.strerror}", hint=COPY_AGAIN) from error


def read_video_document(file: BinaryIO, suffix: str, name: str) -> str | None:
    """Return the metadata document in a file; None if it has none."""
    with _open_container(file, suffix, name) as container:
        # The keys in Matroska files are uppercase.
        return {key.lower(): text for key, text in container.metadata.items()}.get(DOCUMENT_KEY)


def decode_video_file(file: BinaryIO, suffix: str, name: str, *, max_frames: int, max_pixels: int) -> Video:
    """Return the frames and the audio track of a file."""
    with _open_container(file, suffix, name) as container:
        track = _VideoTrack(container, name, max_frames, max_pixels)
        audio_track = None
        if container.streams.audio:
            max_seconds = max_frames / track.fps + _EXTRA_AUDIO_SECONDS
            audio_track = _AudioTrack(container.streams.audio[0], name, max_seconds)
        for packet in _read_packets(container, name):
            track.decode(packet)
            if audio_track is not None:
                audio_track.decode(packet)
        return track.finish(audio_track.finish() if audio_track is not None else None)


def decode_audio_track(file: BinaryIO, suffix: str, name: str, *, max_seconds: float) -> Audio:
    """Return the audio track of a file."""
    with _open_container(file, suffix, name) as container:
        if not container.streams.audio:
            raise UsageError(f"{name} has no audio track", hint="use a file with an audio track")
        track = _AudioTrack(container.streams.audio[0], name, max_seconds)
        for packet in _read_packets(container, name):
            track.decode(packet)
        return track.finish()


class _VideoTrack:
    """The video track of a file while it is decoded."""

    def __init__(self, container: InputContainer, name: str, max_frames: int, max_pixels: int) -> None:
        if not container.streams.video:
            raise UsageError(f"{name} contains no video", hint="use a file with a video track")
        self.stream = container.streams.video[0]
        self.name, self.max_frames, self.max_pixels = name, max_frames, max_pixels
        _check_codec(self.stream, name)
        self.fps = float(self.stream.average_rate or self.stream.guessed_rate or 0)
        if not 0 < self.fps <= _MAX_FPS:
            raise UsageError(f"{name} has the invalid frame rate {self.fps:g}", hint=COPY_AGAIN)
        self._check_size(self.stream)
        self.stream.thread_type = "AUTO"
        self.images: list[Image.Image] = []

    def decode(self, packet: Packet[Any]) -> None:
        """Decode a packet, if it belongs to the track."""
        if packet.stream is not self.stream:
            return
        for frame in self.stream.decode(packet):
            self._check_size(frame)
            if len(self.images) == self.max_frames:
                raise UsageError(f"{self.name} has more than {self.max_frames} frames", hint="use a shorter video")
            if frame.is_corrupt:
                raise UsageError(f"{self.name} is damaged: a frame cannot be decoded", hint=COPY_AGAIN)
            self.images.append(_convert_frame(frame))

    def finish(self, audio: Audio | None) -> Video:
        """Return the video of all packets."""
        if not self.images:
            raise UsageError(f"{self.name} contains no frames", hint=COPY_AGAIN)
        if len({image.size for image in self.images}) > 1:
            raise UsageError(
                f"the frames of {self.name} have different sizes", hint="use a video with frames of the same size"
            )
        return Video(self.images, self.fps, audio)

    def _check_size(self, frame: VideoStream | VideoFrame) -> None:
        if frame.width * frame.height > self.max_pixels:
            raise UsageError(
                f"{self.name} has frames of {frame.width}x{frame.height} pixels, more than the maximum of "
                f"{self.max_pixels:,} pixels",
                hint="use a smaller video",
            )


class _AudioTrack:
    """The audio track of a file while it is decoded."""

    def __init__(self, stream: AudioStream, name: str, max_seconds: float) -> None:
        import av

        _check_codec(stream, name)
        self.stream, self.name, self.max_seconds = stream, name, max_seconds
        self.rate, self.channels = stream.rate, stream.channels
        self.parts: list[np.ndarray[Any, np.dtype[np.float32]]] = []
        self.length = 0
        check_audio_size(name, self.channels, self.rate, 0, max_seconds)
        self.resampler = av.AudioResampler("fltp", stream.layout, self.rate)

    def decode(self, packet: Packet[Any]) -> None:
        """Decode a packet, if it belongs to the track."""
        if packet.stream is not self.stream:
            return
        for frame in self.stream.decode(packet):
            for part in self.resampler.resample(frame):
                self.length += part.samples
                check_audio_size(self.name, self.channels, self.rate, self.length, self.max_seconds)
                self.parts.append(part.to_ndarray().astype(np.float32, copy=False))

    def finish(self) -> Audio:
        """Return the audio of all packets."""
        if not self.length:
            raise UsageError(f"the audio track of {self.name} is empty", hint=COPY_AGAIN)
        samples = np.concatenate(self.parts, axis=1)
        duration, time_base = self.stream.duration, self.stream.time_base
        if duration and time_base is not None:
            # AAC has a fixed frame size; the samples that fill the last frame are not part of the audio.
            samples = samples[:, : round(duration * time_base * self.rate)]
        return Audio(np.ascontiguousarray(samples), self.rate)


def _read_packets(container: InputContainer, name: str) -> Iterator[Packet[Any]]:
    """Yield the packets of the first video and audio track."""
    for packet in container.demux(*container.streams.video[:1], *container.streams.audio[:1]):
        if packet.is_corrupt:  # the end of the file is missing
            raise UsageError(f"{name} is truncated", hint=COPY_AGAIN)
        yield packet


def _check_segment_size(file: BinaryIO, name: str) -> None:
    """Raise `UsageError` if a WebM file is shorter than it declares: FFmpeg reports no error at the end.

    The file starts with a header element, followed by the segment element, which contains everything else.
    """
    content = file.read(_WEBM_HEADER_BYTES)
    length = file.seek(0, io.SEEK_END)
    file.seek(0)
    position = 0
    for _ in range(2):
        position += 4  # identifier of the element
        if position >= len(content) or not content[position]:
            return  # FFmpeg reports the damage
        size_bytes = 9 - content[position].bit_length()
        value_bits = 7 * size_bytes
        size = int.from_bytes(content[position : position + size_bytes], "big") & (2**value_bits - 1)
        position += size_bytes
        is_unknown = size == 2**value_bits - 1  # as in live streams
        if not is_unknown and position + size > length:
            raise UsageError(f"{name} is truncated", hint=COPY_AGAIN)
        position += size


def _check_codec(stream: VideoStream | AudioStream, name: str) -> None:
    # PyAV has no codec context if FFmpeg has no decoder.
    codec = stream.codec_context.codec.canonical_name if stream.codec_context is not None else "unknown"
    if codec not in _CODECS:
        raise UsageError(
            f"{name} has the codec {codec}, which is not supported", hint="convert it to an MP4 file with H.264 and AAC"
        )


def _convert_frame(frame: VideoFrame) -> Image.Image:
    colorspace = frame.colorspace
    if colorspace == _UNSPECIFIED:
        colorspace = _BT709 if frame.height >= _HD_HEIGHT else _BT601
    converted = frame.reformat(
        format="rgb24",
        src_colorspace=colorspace,
        interpolation=EXACT_CONVERSION,
        threads=1,
    )
    image = Image.fromarray(converted.to_ndarray())
    # Phones store videos in the orientation of the sensor.
    return image.rotate(frame.rotation, expand=True) if frame.rotation % 90 == 0 and frame.rotation else image
