"""Where a picture comes from: the record in its file, written and read back in every format, and damaged on purpose."""

import io
import json
import shutil
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from anyaccel.errors import UsageError
from anyaccel.generation.image_format import encode_image, read_metadata
from anyaccel.generation.metadata import (
    ImageMetadata,
    describe_metadata,
    find_differences,
    read_document,
    record_call,
    write_document,
)
from anyaccel.generation.model_name import digest_folder, resolve_model

HELD, _ = record_call({"original_size": (64, 64), "sigmas": [1.0, 0.5], "clip_skip": 1})
ORIGIN = ImageMetadata(
    model="org/name",
    revision="0123456789abcdef0123456789abcdef01234567",
    pipeline="StableDiffusionPipeline",
    prompt='ein grüner Baum, 中文, "quoted"\nand a second line 🌳',
    negative_prompt="Schnee",
    seed=2**64 - 1,
    steps=16,
    guidance=2.5,
    width=8,
    height=16,
    dtype="bfloat16",
    device="neuron:0",
    virtual=True,
    scheduler="DDIMScheduler",
    scheduler_config={"beta_start": 0.00085, "trained_betas": None},
    versions={"anyaccel": "0.1.0", "torch": "2.13.0"},
    call=HELD,
)


def picture(mode: str = "RGB") -> Image.Image:
    image = Image.new(mode, (ORIGIN.width, ORIGIN.height))
    image.putpixel((1, 2), 200 if mode == "L" else (10, 200, 30) if mode == "RGB" else (10, 200, 30, 40))
    return image


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".jpeg", ".webp", ".PNG"])
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
def test_every_format_keeps_the_whole_recipe(tmp_path: Path, suffix: str, mode: str) -> None:
    path = tmp_path / f"picture{suffix}"
    path.write_bytes(encode_image(picture(mode), suffix, [ORIGIN]))
    assert read_metadata(path) == (ORIGIN,)
    with Image.open(path) as image:
        assert image.size == (8, 16)
        if suffix.lower() == ".png":
            assert image.tobytes() == picture(mode).tobytes()


@settings(max_examples=60, deadline=None)
@given(prompt=st.text(), negative=st.none() | st.text(), seed=st.integers(0, 2**64 - 1))
def test_any_text_comes_back(prompt: str, negative: str | None, seed: int) -> None:
    origin = replace(ORIGIN, prompt=prompt, negative_prompt=negative, seed=seed)
    assert read_document(write_document([origin])) == (origin,)
    for suffix in (".png", ".jpg"):
        encoded = io.BytesIO(encode_image(picture(), suffix, [origin]))
        with Image.open(encoded) as image:
            assert image.format is not None


def test_the_same_picture_is_the_same_file() -> None:
    assert encode_image(picture(), ".png", [ORIGIN]) == encode_image(picture(), ".png", [ORIGIN])


def test_people_and_other_programs_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(encode_image(picture(), ".png", [ORIGIN]))
    with Image.open(path) as image:
        words = image.info["parameters"]
        assert image.info["Software"] == "anyaccel 0.1.0"
    assert words == describe_metadata(ORIGIN)
    assert words.startswith(
        ORIGIN.prompt + "\nNegative prompt: Schnee\nSteps: 16, Sampler: DDIMScheduler, CFG scale: 2.5"
    )
    assert "Device: neuron:0 (virtual)" in words


def test_a_sheet_lists_every_picture_and_says_once_what_they_share(tmp_path: Path) -> None:
    origins = tuple(replace(ORIGIN, prompt=f"thing {number}", seed=number) for number in range(200))
    for suffix in (".png", ".jpg"):
        path = tmp_path / f"sheet{suffix}"
        path.write_bytes(encode_image(picture(), suffix, origins[:100]))
        assert read_metadata(path) == origins[:100]
    assert write_document(origins).count("scheduler_config") == 1


def test_a_record_that_is_too_long_for_a_jpeg_says_so() -> None:
    with pytest.raises(UsageError, match="64 KiB") as caught:
        encode_image(picture(), ".jpg", [replace(ORIGIN, prompt="x" * 70_000)])
    assert "png" in caught.value.hint


def damage(**changed: Any) -> str:
    document = json.loads(write_document([ORIGIN])) | changed
    return json.dumps({name: value for name, value in document.items() if value != "gone"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ("[]", "not a record"),
        ("{}", "not a record"),
        ("[" * 100_000, "recursion"),
        (damage(format=2), "of format 2"),
        (damage(format="1"), "not a record"),
        (damage(seed="gone"), "it has no seed"),
        (damage(seed=-1), "its seed is -1"),
        (damage(seed=2**64), "its seed is"),
        (damage(seed=True), "its seed is True"),
        (damage(seed="7"), "its seed is '7'"),
        (damage(prompt=None), "its prompt is None"),
        (damage(steps=1.5), "its steps is 1.5"),
        (damage(virtual=0), "its virtual is 0"),
        (damage(call=[]), r"its call is \[\]"),
        (damage(pictures=[]), "list of pictures"),
        (damage(pictures={"seed": 1}), "list of pictures"),
        (damage(pictures=[1]), "list of pictures"),
        (damage(pictures=[{"seed": "x"}]), "its seed is 'x'"),
    ],
)
def test_a_damaged_record_is_a_clear_error(tmp_path: Path, text: str, words: str) -> None:
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    info.add_itxt("anyaccel", text)
    path = tmp_path / "damaged.png"
    picture().save(path, pnginfo=info)
    with pytest.raises(UsageError, match=f"(?s)damaged.png.*{words}") as caught:
        read_metadata(path)
    assert caught.value.hint


def test_what_a_later_version_adds_is_passed_over() -> None:
    assert read_document(damage(weather="rain")) == (ORIGIN,)


def test_pictures_that_are_not_ours(tmp_path: Path) -> None:
    whole = encode_image(picture(), ".png", [ORIGIN])
    files = {
        "plain.png": encode_plain("PNG"),
        "plain.jpg": encode_plain("JPEG"),
        "plain.webp": encode_plain("WEBP"),
        "plain.gif": encode_plain("GIF"),
        "empty.png": b"",
        "text.png": b"hello",
        "cut.png": whole[:40],
        "torn.png": whole.replace(b'"seed"', b'"sead"'),  # the checksum is wrong then
        "bomb.png": bomb(),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError, match=name) as caught:
            read_metadata(tmp_path / name)
        assert caught.value.hint
    for name in ("missing.png", "."):
        with pytest.raises(UsageError, match="cannot be read"):
            read_metadata(tmp_path / name)


def encode_plain(kind: str) -> bytes:
    stream = io.BytesIO()
    picture().save(stream, kind)
    return stream.getvalue()


def bomb() -> bytes:
    """A record that unpacks to far more than it weighs."""
    content = b"anyaccel\0\1\0\0\0" + zlib.compress(b" " * 100_000_000)
    chunk = b"iTXt" + content
    packed = len(content).to_bytes(4, "big") + chunk + zlib.crc32(chunk).to_bytes(4, "big")
    plain = encode_plain("PNG")
    return plain[:33] + packed + plain[33:]


def test_a_picture_that_is_cut_off_behind_its_record_still_says_how_it_was_made(tmp_path: Path) -> None:
    whole = encode_image(picture(), ".png", [ORIGIN])
    (tmp_path / "cut.png").write_bytes(whole[:-20])
    assert read_metadata(tmp_path / "cut.png") == (ORIGIN,)


def test_the_arguments_are_those_of_generate() -> None:
    assert ORIGIN.arguments() == {
        "prompt": ORIGIN.prompt,
        "model": "org/name",
        "revision": ORIGIN.revision,
        "device": "virtual:neuron",
        "seed": 2**64 - 1,
        "dtype": "bfloat16",
        "num_inference_steps": 16,
        "guidance_scale": 2.5,
        "negative_prompt": "Schnee",
        "original_size": (64, 64),
        "sigmas": [1.0, 0.5],
        "clip_skip": 1,
    }
    folder = replace(ORIGIN, model="~/models/mine", revision="sha256:12", virtual=False, device="cuda:3")
    assert folder.arguments()["revision"] is None
    assert folder.arguments()["device"] == "cuda"


def test_what_no_text_can_hold_is_named() -> None:
    held, left_out = record_call({"image": picture(), "eta": float("nan"), "height": 8, "num_inference_steps": 4})
    assert (held, left_out) == ({"height": 8}, ("image", "eta"))
    with pytest.raises(UsageError, match="made with image, eta"):
        replace(ORIGIN, unrecorded=left_out).arguments()


def test_differences_are_named() -> None:
    assert find_differences(ORIGIN, ORIGIN) == []
    now = replace(
        ORIGIN,
        device="cpu:0",
        virtual=False,
        revision=None,
        dtype="float32",
        versions={"anyaccel": "0.1.0", "torch": "2.14.0"},
        scheduler_config={"beta_start": 0.1},
    )
    assert find_differences(ORIGIN, now) == [
        "torch was 2.13.0, and is 2.14.0",
        f"the revision was {ORIGIN.revision}, and is not known",
        "the dtype was bfloat16, and is float32",
        "the settings of DDIMScheduler were others",
        "the device was virtual:neuron, and is cpu",
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    (model / "unet").mkdir(parents=True)
    (model / "model_index.json").write_text('{"_class_name": "X", "unet": ["diffusers", "U"]}')
    (model / "unet" / "config.json").write_text("{}")
    (model / "unet" / "weights.dat").write_bytes(bytes(3 * 2**20))
    return model


def test_a_digest_follows_the_model_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    before = digest_folder(folder)
    (folder / "picture.png").write_bytes(b"made today")
    (folder / "unet" / ".lock").write_bytes(b"")
    assert digest_folder(folder) == before
    assert digest_folder(Path(shutil.copytree(folder, tmp_path / "copy"))) == before
    assert digest_folder(folder, whole=True) != before  # it reads more, and is another digest

    weights = bytearray(3 * 2**20)
    weights[-1] = 1
    (folder / "unet" / "weights.dat").write_bytes(weights)
    trained = digest_folder(folder)
    (folder / "unet" / "config.json").write_text('{"a": 1}')
    assert len({before, trained, digest_folder(folder)}) == 3


def test_a_folder_is_named_without_its_user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    monkeypatch.chdir(folder.parent)
    assert resolve_model("model").name == "~/model"
    assert resolve_model("~/model").source == str(folder)
    assert resolve_model("org/name").kind == "hub"
    with pytest.raises(UsageError, match="has no revisions"):
        resolve_model("~/model", revision="main")
    with pytest.raises(UsageError, match="is no model"):
        resolve_model(3)  # type: ignore[arg-type]
