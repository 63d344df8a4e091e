"""File formats: what they can contain, missing libraries, size limits and the types of media."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from anyaccel.errors import MissingLibraryError, UsageError
from anyaccel.media import formats
from anyaccel.media.encode import encode, estimate_bytes
from anyaccel.media.formats import SUFFIXES, check_format, default_suffix
from anyaccel.media.output import check_free_space, find_sidecar, write_media
from anyaccel.media.types import Audio, Kind, Media, Video, kind_of
from tests.conftest import ROOT, inherit_environment
from tests.media.samples import make_audio, make_frame, make_noise, make_video

PAGE = ROOT / "docs" / "media.md"


@pytest.mark.parametrize("kind", ["image", "video", "audio"])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_each_format_accepts_its_kinds(suffix: str, kind: Kind) -> None:
    samples: dict[Kind, Media] = {"image": make_frame(), "video": make_video(2), "audio": make_audio(0.1)}
    media = samples[kind]
    assert kind_of(media) == kind
    if kind in SUFFIXES[suffix].kinds:
        check_format(suffix, kind)
        assert encode(media, suffix.upper()) == encode(media, suffix)
        return
    for check in (lambda: check_format(suffix, kind), lambda: encode(media, suffix)):
        with pytest.raises(UsageError, match=f"a {suffix} file cannot contain") as caught:
            check()
        named = {name for name in SUFFIXES if name in caught.value.hint.replace(",", " ").split()}
        assert named == {item.suffix for item in SUFFIXES.values() if kind in item.kinds}


def test_default_suffixes_can_contain_their_kind() -> None:
    kinds: tuple[Kind, ...] = ("image", "video", "audio")
    assert [default_suffix(kind) for kind in kinds] == [".png", ".mp4", ".wav"]
    for kind in kinds:
        check_format(default_suffix(kind), kind, with_audio=kind == "video")


@pytest.mark.parametrize("suffix", [".gif", ".webp"])
def test_animations_have_no_audio(suffix: str) -> None:
    with pytest.raises(UsageError, match=r"cannot contain video with an audio track") as caught:
        check_format(suffix, "video", with_audio=True)
    assert ".mp4 or .webm" in caught.value.hint
    with pytest.raises(UsageError, match=r"cannot contain video with an audio track"):
        encode(make_video(1, audio=make_audio(0.1)), suffix)


def test_unknown_suffix_suggests_a_similar_one() -> None:
    with pytest.raises(UsageError, match=r"'\.mpg4' is not a supported file suffix") as caught:
        check_format(".mpg4", "video")
    assert "did you mean .mp4?" in caught.value.hint


WITHOUT_LIBRARIES = """
import sys
sys.modules["av"] = sys.modules["soundfile"] = None
from pathlib import Path
from anyaccel.errors import MissingLibraryError
from anyaccel.media.decode import decode_audio, decode_image, decode_video
from anyaccel.media.encode import encode
from anyaccel.media.formats import check_format, default_suffix
from tests.media.samples import LIMITS, make_audio, make_frame, make_video

assert default_suffix("video") == ".webp"
assert decode_image(encode(make_frame(), ".png"), max_pixels=10**6).size == (64, 48)
assert len(decode_video(encode(make_video(2), ".webp"), **LIMITS)) == 2
mp4, webm = b"\\0\\0\\0\\x20ftypisom" + bytes(20), b"\\x1a\\x45\\xdf\\xa3" + bytes(20)
for extra, call in [
    ("video", lambda: check_format(".mp4", "video")),
    ("video", lambda: encode(make_video(2), ".webm")),
    ("video", lambda: decode_video(mp4, **LIMITS)),
    ("video", lambda: decode_audio(webm, max_seconds=1)),
    ("audio", lambda: check_format(".wav", "audio")),
    ("audio", lambda: encode(make_audio(), ".flac")),
    ("audio", lambda: decode_audio(b"fLaC" + bytes(20), max_seconds=1)),
]:
    try:
        call()
    except MissingLibraryError as error:
        assert error.hint == f"pip install 'anyaccel[{extra}]'", error
        assert "which is not installed" in error.message, error
    else:
        raise AssertionError(extra)
"""


def test_without_the_libraries() -> None:
    subprocess.run(
        [sys.executable, "-c", WITHOUT_LIBRARIES],
        cwd=ROOT,
        env={**inherit_environment(), "PYTHONPATH": ":".join(filter(None, sys.path))},
        check=True,
        timeout=120,
    )


def test_missing_encoder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    mp4 = SUFFIXES[".mp4"]
    without = formats.Format(mp4.suffix, mp4.kinds, mp4.media_type, "video", video_encoders=("libnonexistent",))
    monkeypatch.setattr(formats, "SUFFIXES", {".mp4": without})
    with pytest.raises(
        MissingLibraryError, match="require the encoder libnonexistent, which the installed PyAV"
    ) as caught:
        check_format(".mp4", "video")
    assert "anyaccel[video]" in caught.value.hint


def test_documentation_lists_the_formats() -> None:
    rows = re.findall(
        r"^\| `(\..+?)` \| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert [row[0] for row in rows] == list(SUFFIXES)
    for suffix, content, requires, codec, metadata in rows:
        item = SUFFIXES[suffix]
        assert set(content.split(", ")) - {"video with audio"} == item.kinds
        assert ("video with audio" in content) == (item.audio_encoder is not None)
        assert requires == (f"`anyaccel[{item.extra}]`" if item.extra else "–")
        assert codec.startswith("lossless") == item.lossless
        assert metadata == ("in the file" if item.embeds_metadata else f"in `NAME{suffix}.json`")


NOISE_SIZES = [(64, 48), (150, 100), (16, 16)]


@pytest.mark.parametrize("size", NOISE_SIZES)
@pytest.mark.parametrize("suffix", [suffix for suffix in SUFFIXES if "audio" not in SUFFIXES[suffix].kinds])
def test_estimated_size_is_not_exceeded_by_noise(suffix: str, size: tuple[int, int]) -> None:
    document = "{" + "x" * 20_000 + "}"
    if "image" in SUFFIXES[suffix].kinds:
        content = encode(make_noise(*size), suffix, document=document)
        assert len(content) < estimate_bytes("image", suffix, width=size[0], height=size[1], frames=1, seconds=0)
    if "video" in SUFFIXES[suffix].kinds:
        audio = make_audio(0.25) if SUFFIXES[suffix].audio_encoder is not None else None
        video = Video([make_noise(*size, seed) for seed in range(6)], 24, audio)
        content = encode(video, suffix, document=document)
        estimated = estimate_bytes("video", suffix, width=size[0], height=size[1], frames=6, seconds=0.25)
        assert len(content) < estimated
        # The part of the estimate for the pixels is not far too large.
        fixed = estimate_bytes("video", suffix, width=0, height=0, frames=6, seconds=0.25)
        assert size != NOISE_SIZES[1] or estimated - fixed < 2.5 * len(encode(Video(video.frames, 24), suffix))


@pytest.mark.parametrize("suffix", [".wav", ".flac"])
def test_estimated_size_is_not_exceeded_by_audio(suffix: str) -> None:
    samples = np.random.default_rng(0).uniform(-1, 1, (2, 480_000)).astype(np.float32)
    content = encode(Audio(samples, 48_000), suffix)
    assert len(content) < estimate_bytes("audio", suffix, width=0, height=0, frames=0, seconds=10)


def test_too_large_sizes_are_rejected_before_encoding() -> None:
    with pytest.raises(UsageError, match="at most 16383 pixels per side, not 16384x1") as caught:
        encode(Image.new("RGB", (16_384, 1)), ".webp")
    assert ".png or .jpg or .jpeg" in caught.value.hint
    with pytest.raises(UsageError, match="at most 50 frames per second, not 60"):
        encode(make_video(2, 60), ".gif")
    for fps in (5e-324, 0.001, 1e9):
        with pytest.raises(UsageError, match=r"from 0\.01 to 1000 frames per second"):
            encode(make_video(2, fps), ".mp4")
    with pytest.raises(UsageError, match="quality must be from 0 to 100, not 101"):
        encode(make_frame(), ".jpg", quality=101)


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "sound.wav"
    write_media(path, b"first", '{"seed": 1}', overwrite=False)
    with pytest.raises(FileExistsError):
        write_media(path, b"second", '{"seed": 2}', overwrite=False)
    path.unlink()
    with pytest.raises(FileExistsError):  # the metadata of another file
        write_media(path, b"second", '{"seed": 2}', overwrite=False)
    assert not path.exists()
    assert find_sidecar(path).read_text() == '{"seed": 1}'
    write_media(path, b"second", '{"seed": 2}')
    assert (path.read_bytes(), find_sidecar(path).read_text()) == (b"second", '{"seed": 2}')


def test_free_space_is_checked(tmp_path: Path) -> None:
    check_free_space(tmp_path / "not" / "created", 1)
    with pytest.raises(UsageError, match=r"needs up to 1\.02e\+03 TiB|needs up to .*GiB, but the disk has only"):
        check_free_space(tmp_path, 2**50)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Video([], 24), "at least one frame"),
        (lambda: Video([make_frame()], 0), "frame rate must be a positive number, not 0"),
        (lambda: Video([make_frame()], float("nan")), "frame rate must be a positive number, not nan"),
        (lambda: Video([make_frame(), make_frame(32, 32)], 24), "frame 1 is RGB of 32x32 pixels"),
        (lambda: Video([make_frame().convert("L")], 24), "frame 0 is L of 64x48 pixels"),
        (lambda: Audio(np.zeros(10, np.float32), 8000), r"not float32 of shape \(10,\)"),
        (lambda: Audio(np.zeros((1, 10)), 8000), r"not float64 of shape \(1, 10\)"),  # type: ignore[arg-type]
        (lambda: Audio(np.zeros((1, 0), np.float32), 8000), "non-empty"),
        (lambda: Audio([[0.0]], 8000), "not list"),  # type: ignore[arg-type]
        (lambda: Audio(np.zeros((1, 10), np.float32), 0), "sample rate must be positive, not 0"),
        (lambda: kind_of("file.png"), "str is not an image, a video or audio"),  # type: ignore[arg-type]
        (lambda: encode(Audio(np.full((1, 9), np.nan, np.float32), 8000), ".wav"), "NaN or Inf"),
        (lambda: encode(Audio(np.zeros((9, 9), np.float32), 8000), ".wav"), "at most 8 channels"),
    ],
)
def test_invalid_media_are_rejected(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        make()
    assert caught.value.hint
