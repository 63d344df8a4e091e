"""Encoding and decoding: content, frame rate, length, metadata and determinism in every format."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from anyaccel.errors import UsageError
from anyaccel.media import video_files
from anyaccel.media.decode import decode_audio, decode_image, decode_video, read_document
from anyaccel.media.encode import encode
from anyaccel.media.formats import SUFFIXES
from anyaccel.media.output import find_sidecar, write_media
from anyaccel.media.types import Audio, Media, Video
from tests.media.samples import DOCUMENT, LIMITS, make_audio, make_frame, make_video, measure_psnr

VIDEO_SUFFIXES = [".mp4", ".webm", ".webp", ".gif"]
# GIF has 256 colors.
MIN_PSNR_DB = {".mp4": 35, ".webm": 35, ".webp": 35, ".gif": 28}


def make_media(suffix: str) -> Media:
    kinds = SUFFIXES[suffix].kinds
    return make_video(3) if "video" in kinds else make_audio() if "audio" in kinds else make_frame()


@pytest.mark.parametrize("suffix", VIDEO_SUFFIXES)
@pytest.mark.parametrize("fps", [8, 24, 30])
def test_video_has_the_same_frames_and_frame_rate(suffix: str, fps: float) -> None:
    video = make_video(6, fps)
    decoded = decode_video(encode(video, suffix), **LIMITS)
    assert len(decoded) == 6
    # GIF stores multiples of 10 ms, and WebP of 1 ms.
    resolution_s = {".gif": 0.01, ".webp": 0.001}.get(suffix, 1e-6)
    assert decoded.seconds == pytest.approx(video.seconds, abs=resolution_s)
    for frame, expected in zip(decoded.frames, video.frames, strict=True):
        assert frame.mode == "RGB"
        assert measure_psnr(frame, expected) > MIN_PSNR_DB[suffix]


def test_webm_has_av1_if_vp9_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    av1 = dataclasses.replace(SUFFIXES[".webm"], video_encoders=("libnonexistent", "libsvtav1"))
    monkeypatch.setattr(video_files, "SUFFIXES", {".webm": av1})
    video = make_video(6, width=65)
    contents = {encode(video, ".webm", document=DOCUMENT) for _ in range(3)}
    assert len(contents) == 1
    decoded = decode_video(contents.pop(), **LIMITS)
    assert (len(decoded), decoded.fps, decoded.width) == (6, 24, 66)
    for frame, expected in zip(decoded.frames, video.frames, strict=True):
        assert measure_psnr(frame.crop((0, 0, 65, 48)), expected) > 35


@pytest.mark.parametrize("suffix", [".mp4", ".webm"])
@pytest.mark.parametrize("fps", [23.976, 24000 / 1001, 7.5, 60])
def test_frame_rate_is_preserved(suffix: str, fps: float) -> None:
    assert decode_video(encode(make_video(2, fps), suffix), **LIMITS).fps == pytest.approx(fps, rel=1e-4)


@pytest.mark.parametrize("suffix", VIDEO_SUFFIXES)
@pytest.mark.parametrize("size", [(63, 47), (2, 2), (1, 1), (64, 33)])
def test_odd_sizes(suffix: str, size: tuple[int, int]) -> None:
    width, height = size
    decoded = decode_video(encode(make_video(2, width=width, height=height), suffix), **LIMITS)
    padding = 1 if suffix in (".mp4", ".webm") else 0
    assert (decoded.width, decoded.height) == (width + padding * (width % 2), height + padding * (height % 2))
    assert len(decoded) == 2
    if width > 2:
        cropped = decoded.frames[1].crop((0, 0, width, height))
        assert measure_psnr(cropped, make_frame(width, height, 1 / 6)) > MIN_PSNR_DB[suffix]
        # The padding repeats the last column and row.
        edge = np.asarray(decoded.frames[1], dtype=int)
        assert np.abs(edge[:, -1] - edge[:, -2]).mean() < 8


@pytest.mark.parametrize("suffix", VIDEO_SUFFIXES)
def test_one_frame(suffix: str) -> None:
    decoded = decode_video(encode(make_video(1), suffix), **LIMITS)
    assert len(decoded) == 1
    assert measure_psnr(decoded.frames[0], make_frame()) > MIN_PSNR_DB[suffix]


@pytest.mark.parametrize("suffix", [".webp", ".gif"])
def test_repeated_frames_are_decoded_again(suffix: str) -> None:
    """Encoders of animations store equal frames as one frame."""
    first, second = make_frame(), make_frame(time=0.5)
    frames = [first, first, first, second, second, first]
    decoded = decode_video(encode(Video(frames, 20), suffix), **LIMITS)
    assert decoded.fps == pytest.approx(20)
    expected = [first, first, first, second, second, first]
    assert all(
        measure_psnr(frame, image) > MIN_PSNR_DB[suffix] for frame, image in zip(decoded.frames, expected, strict=True)
    )


@pytest.mark.parametrize("suffix", [".mp4", ".webm"])
@pytest.mark.parametrize(("rate", "channels"), [(48_000, 2), (16_000, 1)])
def test_video_with_audio(suffix: str, rate: int, channels: int) -> None:
    audio = make_audio(0.25, rate, channels)
    content = encode(make_video(6, audio=audio), suffix)
    for decoded in (decode_video(content, **LIMITS).audio, decode_audio(content, max_seconds=1)):
        assert decoded is not None
        assert decoded.seconds == pytest.approx(0.25, abs=0.001)
        assert decoded.samples.shape[0] == channels
        # Opus has 48,000 samples per second.
        samples = decoded.samples[:, :: decoded.rate // rate][:, : audio.samples.shape[1]]
        assert np.abs(samples - audio.samples[:, : samples.shape[1]]).max() < 0.1


@pytest.mark.parametrize("suffix", [".wav", ".flac"])
@pytest.mark.parametrize(("rate", "channels"), [(48_000, 2), (16_000, 1), (44_100, 6)])
def test_audio_is_exact_to_16_bits(suffix: str, rate: int, channels: int) -> None:
    samples = (np.random.default_rng(0).integers(-32768, 32768, (channels, 500)) / 32768).astype(np.float32)
    decoded = decode_audio(encode(Audio(samples, rate), suffix), max_seconds=1)
    assert decoded.rate == rate
    assert np.array_equal(decoded.samples, samples)


def test_loud_audio_is_clipped() -> None:
    decoded = decode_audio(encode(Audio(np.array([[-3.0, 0.5, 3.0]], np.float32), 8000), ".wav"), max_seconds=1)
    assert decoded.samples.tolist() == [[-1.0, 0.5, 32767 / 32768]]


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp"])
@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
def test_images(suffix: str, mode: str) -> None:
    image = make_frame().convert(mode)
    decoded = decode_image(encode(image, suffix), max_pixels=10**6)
    modes = {".png": ("L", "RGB", "RGBA"), ".jpg": ("L", "RGB"), ".webp": ("RGB",)}[suffix]
    assert decoded.mode == (mode if mode in modes else "RGB")
    assert measure_psnr(decoded.convert("RGB"), image.convert("RGB")) > (100 if suffix == ".png" else 35)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_document_of_20_kb(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"file{suffix}"
    write_media(path, encode(make_media(suffix), suffix, document=DOCUMENT, comment="A föx 🦊"), DOCUMENT)
    assert read_document(path) == DOCUMENT
    assert find_sidecar(path).exists() == (not SUFFIXES[suffix].embeds_metadata)
    plain = tmp_path / f"plain{suffix}"
    write_media(plain, encode(make_media(suffix), suffix, comment="A fox"))
    assert read_document(plain) is None


@pytest.mark.parametrize("suffix", [suffix for suffix in SUFFIXES if SUFFIXES[suffix].embeds_metadata])
def test_document_that_is_not_ascii(suffix: str, tmp_path: Path) -> None:
    text = json.dumps({"prompt": 'ein "grüner" Baum 🌳\n'}, ensure_ascii=False)
    path = tmp_path / f"file{suffix}"
    path.write_bytes(encode(make_media(suffix), suffix, document=text))
    assert json.loads(read_document(path) or "") == json.loads(text)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_same_input_gives_the_same_bytes(suffix: str) -> None:
    media = make_media(suffix)
    if suffix in (".mp4", ".webm"):
        media = make_video(5, audio=make_audio(0.2))
    contents = {encode(media, suffix, document=DOCUMENT, comment="A fox") for _ in range(4)}
    assert len(contents) == 1


@pytest.mark.parametrize("suffix", [".jpg", ".webp", ".mp4", ".webm"])
def test_quality_selects_the_size(suffix: str) -> None:
    media = make_media(suffix)
    low, default, high = (len(encode(media, suffix, quality=quality)) for quality in (20, 95, 100))
    assert low < default < high


def test_mp4_has_the_index_first_and_names_the_colors() -> None:
    import io

    import av

    content = encode(make_video(2), ".mp4", comment="A föx")
    assert content.index(b"moov") < content.index(b"mdat")
    with av.open(io.BytesIO(content), "r") as container:
        assert container.metadata["comment"] == "A föx"
        frame = next(container.decode(video=0))
        assert (frame.colorspace, frame.color_range, frame.color_primaries, frame.color_trc) == (1, 1, 1, 1)
        assert container.streams.video[0].codec_context.pix_fmt == "yuv420p"


@pytest.mark.parametrize("suffix", VIDEO_SUFFIXES)
def test_progress_and_cancellation(suffix: str) -> None:
    video = make_video(5)
    calls: list[tuple[int, int]] = []
    encode(video, suffix, on_frame=lambda done, total: calls.append((done, total)))
    assert calls == [(done, 5) for done in range(1, 6)]

    def cancel(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encode(video, suffix, on_frame=cancel)


def test_folder_of_images(tmp_path: Path) -> None:
    for index in (10, 2, 1):
        make_frame(time=index / 10).save(tmp_path / f"frame-{index}.png")
    (tmp_path / "notes.txt").write_text("not an image")
    video = decode_video(tmp_path, **LIMITS)
    assert video.fps == 10
    for frame, index in zip(video.frames, (1, 2, 10), strict=True):
        assert frame.tobytes() == make_frame(time=index / 10).tobytes()


def test_orientation_is_applied(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees clockwise to be displayed
    make_frame(64, 48).save(tmp_path / "photo.jpg", exif=exif, quality=95)
    decoded = decode_image(tmp_path / "photo.jpg", max_pixels=10**6)
    assert decoded.size == (48, 64)
    assert measure_psnr(decoded, make_frame(64, 48).transpose(Image.Transpose.ROTATE_270)) > 30


def test_rotated_video_is_displayed_upright() -> None:
    content = encode(make_video(2), ".mp4")
    # The transformation matrix of the track header: identity, and a rotation by 90 degrees clockwise.
    one, zero, minus_one = b"\0\1\0\0", b"\0\0\0\0", b"\xff\xff\0\0"
    identity = one + zero + zero + zero + one
    rotated = zero + one + zero + minus_one + zero
    start = content.index(b"tkhd")
    content = content[:start] + content[start:].replace(identity, rotated, 1)
    decoded = decode_video(content, **LIMITS)
    assert (decoded.width, decoded.height) == (48, 64)
    assert measure_psnr(decoded.frames[0], make_frame().transpose(Image.Transpose.ROTATE_270)) > 35


@pytest.mark.parametrize("mode", ["1", "P", "I;16", "LA"])
def test_uncommon_image_modes_are_converted(mode: str) -> None:
    import io

    stream = io.BytesIO()
    gray = make_frame().convert("L")
    if mode == "I;16":
        Image.fromarray(np.asarray(gray).astype(np.uint16) * 257).save(stream, "PNG")
    else:
        gray.convert(mode).save(stream, "PNG")
    decoded = decode_image(stream.getvalue(), max_pixels=10**6)
    assert decoded.mode == {"P": "RGB", "LA": "LA"}.get(mode, "L")
    if mode != "1":
        assert measure_psnr(decoded.convert("L"), gray) > 60


def test_video_with_audio_of_three_channels_is_rejected() -> None:
    with pytest.raises(UsageError, match="one or two channels, not 3"):
        encode(make_video(1, audio=make_audio(0.1, channels=3)), ".mp4")
