"""Decoding of untrusted files: limits, and files that are damaged, truncated or mislabeled."""

import functools
import io
import struct
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from anyaccel.errors import UsageError
from anyaccel.media.decode import decode_audio, decode_image, decode_video, read_document
from anyaccel.media.encode import encode
from anyaccel.media.formats import SUFFIXES
from tests.media.samples import DOCUMENT, LIMITS, make_audio, make_frame, make_noise, make_video

Decode = Callable[[Path], object]
DECODERS: dict[str, Decode] = {
    "image": lambda path: decode_image(path, max_pixels=10**6),
    "video": lambda path: decode_video(path, **LIMITS),
    "audio": lambda path: decode_audio(path, max_seconds=10),
}


def check_rejected(decode: Callable[[], object], message: str) -> UsageError:
    with pytest.raises(UsageError, match=message) as caught:
        decode()
    assert caught.value.hint
    return caught.value


@pytest.fixture(scope="module")
def contents() -> dict[str, bytes]:
    """A file of each format."""
    video = make_video(8)
    made = {suffix: encode(video, suffix, document=DOCUMENT) for suffix in (".mp4", ".webm", ".webp", ".gif")}
    made |= {suffix: encode(make_noise(64, 48), suffix, document=DOCUMENT) for suffix in (".png", ".jpg")}
    return made | {suffix: encode(make_audio(), suffix, document=DOCUMENT) for suffix in (".wav", ".flac")}


@pytest.mark.parametrize("fraction", [0.3, 0.6, 0.9, 0.99])
@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp", ".gif", ".mp4", ".webm", ".wav", ".flac"])
def test_truncated_files_are_rejected(suffix: str, fraction: float, contents: dict[str, bytes], tmp_path: Path) -> None:
    path = tmp_path / f"cut{suffix}"
    path.write_bytes(contents[suffix][: int(len(contents[suffix]) * fraction)])
    kind = next(iter(SUFFIXES[suffix].kinds - {"image"} or {"image"}))
    check_rejected(lambda: DECODERS[kind](path), f"cut{suffix}")


@pytest.mark.parametrize("kind", ["image", "video", "audio"])
@pytest.mark.parametrize("suffix", [".png", ".webp", ".gif", ".mp4", ".webm", ".wav", ".flac"])
def test_mislabeled_files_are_rejected(suffix: str, kind: str, contents: dict[str, bytes], tmp_path: Path) -> None:
    """The content decides, not the file name."""
    path = tmp_path / "file.bin"
    path.write_bytes(contents[suffix])
    if kind in SUFFIXES[suffix].kinds or (suffix, kind) == (".gif", "image"):
        DECODERS[kind](path)
    elif kind == "audio" and suffix in (".mp4", ".webm"):
        check_rejected(lambda: DECODERS[kind](path), r"file\.bin has no audio track")
    else:
        check_rejected(lambda: DECODERS[kind](path), rf"file\.bin contains .* \({suffix[1:].upper()}\), not ")


@pytest.mark.parametrize("kind", ["image", "video", "audio"])
@pytest.mark.parametrize(
    "content", [b"", b"hello", b"\0" * 1000, b"#EXTM3U\nhttp://localhost/x", b"ffconcat version 1.0\n"]
)
def test_other_files_are_rejected(kind: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "other.mp4"
    path.write_bytes(content)
    check_rejected(lambda: DECODERS[kind](path), r"other\.mp4 is not a valid file")
    check_rejected(lambda: read_document(path), r"other\.mp4 is not a valid file")


@pytest.mark.parametrize(
    ("suffix", "header"),
    [
        (".png", b"\x89PNG\r\n\x1a\n"),
        (".jpg", b"\xff\xd8\xff"),
        (".gif", b"GIF89a"),
        (".webp", b"RIFF\0\0\0\0WEBP"),
        (".wav", b"RIFF\xff\xff\0\0WAVE"),
        (".flac", b"fLaC"),
        (".mp4", b"\0\0\0 ftypisom"),
        (".webm", b"\x1aE\xdf\xa3"),
    ],
)
def test_garbage_after_a_valid_signature_is_rejected(suffix: str, header: bytes, tmp_path: Path) -> None:
    path = tmp_path / "garbage"
    path.write_bytes(header + make_noise(40, 40).tobytes())
    for kind in SUFFIXES[suffix].kinds:
        check_rejected(functools.partial(DECODERS[kind], path), "garbage")


@pytest.mark.parametrize("kind", ["image", "video", "audio"])
def test_missing_files_and_folders(kind: str, tmp_path: Path) -> None:
    check_rejected(lambda: DECODERS[kind](tmp_path / "missing.mp4"), r"cannot read .*missing\.mp4: No such file")
    check_rejected(lambda: DECODERS[kind](tmp_path), "contains no images" if kind == "video" else "cannot read")


def make_bomb(width: int, height: int) -> bytes:
    """Return a small PNG file that decompresses to many pixels."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    pixels = zlib.compress(bytes(1000) * 1000, 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


@pytest.mark.parametrize("size", [(2000, 2000), (10_000, 10_000), (60_000, 60_000)])
def test_decompression_bombs_are_rejected(size: tuple[int, int]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_rejected(lambda: decode_image(make_bomb(*size), max_pixels=10**6), "pixels")


@pytest.mark.parametrize("suffix", [".mp4", ".webm", ".webp", ".gif"])
def test_limits_of_videos(suffix: str, contents: dict[str, bytes]) -> None:
    content = contents[suffix]
    assert len(decode_video(content, max_frames=8, max_pixels=64 * 48)) == 8
    check_rejected(lambda: decode_video(content, max_frames=7, max_pixels=64 * 48), "the file has more than 7 frames")
    check_rejected(lambda: decode_video(content, max_frames=8, max_pixels=64 * 48 - 1), "64x48 pixels")
    error = check_rejected(
        lambda: decode_video(content, max_frames=7, max_pixels=10**6, name="video"), "^video has more"
    )
    assert "shorter" in error.hint


def test_a_long_animation_of_one_image_is_rejected() -> None:
    """A frame with a duration of a minute would be repeated for each of the short frames."""
    stream = io.BytesIO()
    frames = [make_frame(time=index / 5) for index in range(3)]
    frames[0].save(stream, "GIF", save_all=True, append_images=frames[1:], duration=[20, 60_000, 20])
    check_rejected(lambda: decode_video(stream.getvalue(), **LIMITS), "more than 100 frames")


@pytest.mark.parametrize("suffix", [".wav", ".flac", ".mp4", ".webm"])
def test_limit_of_audio(suffix: str) -> None:
    audio = make_audio(0.5)
    media = audio if "audio" in SUFFIXES[suffix].kinds else make_video(1, audio=audio)
    content = encode(media, suffix)
    assert decode_audio(content, max_seconds=0.6).seconds == pytest.approx(0.5, abs=0.01)
    check_rejected(lambda: decode_audio(content, max_seconds=0.4), r"longer than 0\.4 seconds")


def test_long_audio_of_a_short_video_is_rejected() -> None:
    content = encode(make_video(1, audio=make_audio(12, rate=8000, channels=1)), ".mp4")
    assert decode_audio(content, max_seconds=20).seconds == pytest.approx(12, abs=0.2)
    check_rejected(lambda: decode_video(content, max_frames=1, max_pixels=10**6), "longer than 10.* seconds")


def test_unsupported_codecs_are_rejected() -> None:
    import av

    stream = io.BytesIO()
    with av.open(stream, "w", format="mp4") as container:
        track = container.add_stream("mpeg4", rate=24)
        track.width, track.height, track.pix_fmt = 64, 48, "yuv420p"
        container.mux(track.encode(av.VideoFrame.from_ndarray(np.asarray(make_frame()))))
        container.mux(track.encode(None))
    error = check_rejected(lambda: decode_video(stream.getvalue(), **LIMITS), "codec mpeg4")
    assert "H.264" in error.hint


def test_images_of_different_sizes_in_a_folder_are_rejected(tmp_path: Path) -> None:
    make_frame(64, 48).save(tmp_path / "1.png")
    make_frame(32, 32).save(tmp_path / "2.png")
    check_rejected(lambda: decode_video(tmp_path, **LIMITS), r"2\.png has 32x32 pixels")
    check_rejected(lambda: decode_video(tmp_path, max_frames=1, max_pixels=10**6), "contains 2 images")


def test_damaged_sidecars_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "sound.wav"
    path.write_bytes(encode(make_audio(), ".wav"))
    assert read_document(path) is None
    (tmp_path / "sound.wav.json").write_bytes(b"\xff\xfe")
    check_rejected(lambda: read_document(path), r"cannot read .*sound\.wav\.json")


def test_pillow_formats_that_are_not_supported_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    Image.new("RGB", (8, 8)).save(path, "BMP")
    check_rejected(lambda: decode_image(path, max_pixels=100), r"image\.png is not a valid file of a supported format")
