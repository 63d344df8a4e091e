"""Generation metadata: round trips in every file format, old versions, and damaged files."""

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
    MediaMetadata,
    describe_metadata,
    find_differences,
    read_document,
    record_call,
    write_document,
)
from anyaccel.generation.model_name import digest_folder, resolve_model

RECORDED_CALL, _ = record_call({"original_size": (64, 64), "sigmas": [1.0, 0.5], "clip_skip": 1})
METADATA = MediaMetadata(
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
    call=RECORDED_CALL,
)


def make_image(mode: str = "RGB") -> Image.Image:
    image = Image.new(mode, (METADATA.width, METADATA.height))
    image.putpixel((1, 2), 200 if mode == "L" else (10, 200, 30) if mode == "RGB" else (10, 200, 30, 40))
    return image


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".jpeg", ".webp", ".PNG"])
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
def test_every_format_stores_the_metadata(tmp_path: Path, suffix: str, mode: str) -> None:
    path = tmp_path / f"image{suffix}"
    path.write_bytes(encode_image(make_image(mode), suffix, [METADATA]))
    assert read_metadata(path) == (METADATA,)
    with Image.open(path) as image:
        assert image.size == (8, 16)
        if suffix.lower() == ".png":
            assert image.tobytes() == make_image(mode).tobytes()


@settings(max_examples=60, deadline=None)
@given(prompt=st.text(), negative=st.none() | st.text(), seed=st.integers(0, 2**64 - 1))
def test_any_text_round_trips(prompt: str, negative: str | None, seed: int) -> None:
    metadata = replace(METADATA, prompt=prompt, negative_prompt=negative, seed=seed)
    assert read_document(write_document([metadata])) == (metadata,)
    for suffix in (".png", ".jpg"):
        encoded = io.BytesIO(encode_image(make_image(), suffix, [metadata]))
        with Image.open(encoded) as image:
            assert image.format is not None


def test_same_image_gives_the_same_file() -> None:
    assert encode_image(make_image(), ".png", [METADATA]) == encode_image(make_image(), ".png", [METADATA])


def test_parameters_text_is_readable_by_other_tools(tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(encode_image(make_image(), ".png", [METADATA]))
    with Image.open(path) as image:
        parameters = image.info["parameters"]
        assert image.info["Software"] == "anyaccel 0.1.0"
    assert parameters == describe_metadata(METADATA)
    assert parameters.startswith(
        METADATA.prompt + "\nNegative prompt: Schnee\nSteps: 16, Sampler: DDIMScheduler, CFG scale: 2.5"
    )
    assert "Device: neuron:0 (virtual)" in parameters


def test_contact_sheet_lists_every_image_and_stores_shared_values_once(tmp_path: Path) -> None:
    items = tuple(replace(METADATA, prompt=f"thing {number}", seed=number) for number in range(200))
    for suffix in (".png", ".jpg"):
        path = tmp_path / f"sheet{suffix}"
        path.write_bytes(encode_image(make_image(), suffix, items[:100]))
        assert read_metadata(path) == items[:100]
    assert write_document(items).count("scheduler_config") == 1


def test_metadata_too_long_for_a_jpeg_is_rejected() -> None:
    with pytest.raises(UsageError, match="64 KiB") as caught:
        encode_image(make_image(), ".jpg", [replace(METADATA, prompt="x" * 70_000)])
    assert "png" in caught.value.hint


def damage(**changed: Any) -> str:
    document = json.loads(write_document([METADATA])) | changed
    return json.dumps({name: value for name, value in document.items() if value != "gone"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ("[]", "expected a JSON object with an integer `format`"),
        ("{}", "expected a JSON object with an integer `format`"),
        ("[" * 100_000, "recursion"),
        (damage(format=4), "format 4 is newer than the supported format 3"),
        (damage(format="1"), "expected a JSON object with an integer `format`"),
        (damage(seed="gone"), "the field 'seed' is missing"),
        (damage(seed=-1), r"the seed must be an integer from 0 to 2\*\*64 - 1, not -1"),
        (damage(seed=2**64), r"the seed must be an integer from 0 to 2\*\*64 - 1, not 18446744073709551616"),
        (damage(seed=True), "the field 'seed' has the invalid value True"),
        (damage(seed="7"), "the field 'seed' has the invalid value '7'"),
        (damage(prompt=None), "the field 'prompt' has the invalid value None"),
        (damage(steps=1.5), "the field 'steps' has the invalid value 1.5"),
        (damage(virtual=0), "the field 'virtual' has the invalid value 0"),
        (damage(call=[]), r"the field 'call' has the invalid value \[\]"),
        (damage(images=[]), "list of images"),
        (damage(inputs=[{"name": "image"}]), "invalid input file or adapter"),
        (damage(adapters=["x"]), "invalid input file or adapter"),
        (damage(adapters=[{"kind": "virus", "source": "x", "weight": 1}]), "invalid input file or adapter"),
        (damage(images={"seed": 1}), "list of images"),
        (damage(images=[1]), "list of images"),
        (damage(images=[{"seed": "x"}]), "the field 'seed' has the invalid value 'x'"),
        (damage(pictures=[]), "list of images"),
        (damage(pictures={"seed": 1}), "list of images"),
        (damage(pictures=[1]), "list of images"),
        (damage(pictures=[{"seed": "x"}]), "the field 'seed' has the invalid value 'x'"),
    ],
)
def test_damaged_metadata_is_a_clear_error(tmp_path: Path, text: str, message: str) -> None:
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    info.add_itxt("anyaccel", text)
    path = tmp_path / "damaged.png"
    make_image().save(path, pnginfo=info)
    with pytest.raises(UsageError, match=f"(?s)damaged.png.*{message}") as caught:
        read_metadata(path)
    assert caught.value.hint


def test_contact_sheets_of_version_0_1_are_readable() -> None:
    """Version 0.1 listed the images of a contact sheet under `pictures`."""
    items = tuple(replace(METADATA, seed=seed) for seed in (1, 2))
    document = json.loads(write_document(items))
    document["pictures"] = document.pop("images")
    assert read_document(json.dumps(document | {"format": 1})) == items


def test_format_number_tells_version_0_1_what_it_can_read() -> None:
    """Version 0.1 reads format 1. It would misread a contact sheet, because it ignores `images`."""
    single, sheet = json.loads(write_document([METADATA])), json.loads(write_document([METADATA, METADATA]))
    assert (single["format"], "images" in single) == (1, False)
    assert (sheet["format"], sheet["images"]) == (2, [{}, {}])
    assert "pictures" not in sheet


def test_version_0_1_rejects_images_of_quantized_weights() -> None:
    """It ignores `weights`, and would generate another image."""
    quantized = replace(METADATA, weights="int8", weight_errors={"unet": 0.005})
    text = write_document([quantized])
    assert json.loads(text)["format"] == 2
    assert read_document(text) == (quantized,)
    assert quantized.arguments()["weights"] == "int8"
    assert "weights" not in METADATA.arguments()
    assert find_differences(quantized, METADATA) == ["the weights were int8 and are now not quantized"]
    assert "Weights: int8" in describe_metadata(quantized)


def test_versions_before_format_3_reject_inputs_adapters_videos_and_audio() -> None:
    """They ignore these fields, and would generate another result."""
    digest = "0" * 64
    adapter = {"kind": "lora", "source": "org/style", "weight": 0.5, "sha256": None}
    changes: list[dict[str, Any]] = [
        {"inputs": ({"name": "image", "kind": "image", "path": "~/a.png", "sha256": digest},)},
        {"adapters": (adapter,)},
        {"requested_scheduler": "euler"},
        {"kind": "video", "fps": 16.0, "frames": 81},
        {"kind": "audio", "sampling_rate": 44100},
    ]
    for change in changes:
        item = replace(METADATA, **change)
        assert json.loads(write_document([item]))["format"] == 3
        assert read_document(write_document([item])) == (item,)
        sheet = (METADATA, item)
        assert json.loads(write_document(sheet))["format"] == 3
        assert read_document(write_document(sheet)) == sheet
    assert replace(METADATA, adapters=(adapter,)).arguments()["lora"] == [("org/style", 0.5)]
    assert "Frames: 81, FPS: 16" in describe_metadata(replace(METADATA, **changes[3]))
    assert not {"kind", "inputs", "fps"} & set(json.loads(write_document([METADATA])))


def test_documents_without_the_fields_of_later_versions_are_readable() -> None:
    document = json.loads(write_document([METADATA]))
    del document["weights"], document["weight_errors"]
    assert read_document(json.dumps(document)) == (METADATA,)


def test_unknown_fields_are_ignored() -> None:
    assert read_document(damage(weather="rain")) == (METADATA,)


def test_files_without_readable_metadata_are_rejected(tmp_path: Path) -> None:
    whole = encode_image(make_image(), ".png", [METADATA])
    files = {
        "plain.png": encode_plain("PNG"),
        "plain.jpg": encode_plain("JPEG"),
        "plain.webp": encode_plain("WEBP"),
        "plain.gif": encode_plain("GIF"),
        "empty.png": b"",
        "text.png": b"hello",
        "cut.png": whole[:40],
        "torn.png": whole.replace(b'"seed"', b'"sead"'),  # invalidates the checksum
        "bomb.png": decompression_bomb(),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError, match=name) as caught:
            read_metadata(tmp_path / name)
        assert caught.value.hint
    for name in ("missing.png", "."):
        with pytest.raises(UsageError, match="cannot read"):
            read_metadata(tmp_path / name)


def encode_plain(kind: str) -> bytes:
    stream = io.BytesIO()
    make_image().save(stream, kind)
    return stream.getvalue()


def decompression_bomb() -> bytes:
    """Return a PNG with a small text chunk that decompresses to 100 MB."""
    content = b"anyaccel\0\1\0\0\0" + zlib.compress(b" " * 100_000_000)
    chunk = b"iTXt" + content
    packed = len(content).to_bytes(4, "big") + chunk + zlib.crc32(chunk).to_bytes(4, "big")
    plain = encode_plain("PNG")
    return plain[:33] + packed + plain[33:]


def test_file_truncated_after_its_metadata_is_readable(tmp_path: Path) -> None:
    whole = encode_image(make_image(), ".png", [METADATA])
    (tmp_path / "cut.png").write_bytes(whole[:-20])
    assert read_metadata(tmp_path / "cut.png") == (METADATA,)


def test_arguments_are_those_of_generate() -> None:
    assert METADATA.arguments() == {
        "prompt": METADATA.prompt,
        "model": "org/name",
        "revision": METADATA.revision,
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
    folder = replace(METADATA, model="~/models/mine", revision="sha256:12", virtual=False, device="cuda:3")
    assert folder.arguments()["revision"] is None
    assert folder.arguments()["device"] == "cuda"


def test_arguments_that_cannot_be_stored_are_named() -> None:
    recorded, unrecorded = record_call(
        {"image": make_image(), "eta": float("nan"), "height": 8, "num_inference_steps": 4}
    )
    assert (recorded, unrecorded) == ({"height": 8}, ("image", "eta"))
    with pytest.raises(UsageError, match="does not include: image, eta"):
        replace(METADATA, unrecorded=unrecorded).arguments()


def test_differences_are_named() -> None:
    assert find_differences(METADATA, METADATA) == []
    now = replace(
        METADATA,
        device="cpu:0",
        virtual=False,
        revision=None,
        dtype="float32",
        versions={"anyaccel": "0.1.0", "torch": "2.14.0"},
        scheduler_config={"beta_start": 0.1},
    )
    assert find_differences(METADATA, now) == [
        "torch was 2.13.0 and is now 2.14.0",
        f"the revision was {METADATA.revision} and is now unknown",
        "the dtype was bfloat16 and is now float32",
        "the config of DDIMScheduler has changed",
        "the device was virtual:neuron and is now cpu",
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    (model / "unet").mkdir(parents=True)
    (model / "model_index.json").write_text('{"_class_name": "X", "unet": ["diffusers", "U"]}')
    (model / "unet" / "config.json").write_text("{}")
    (model / "unet" / "weights.dat").write_bytes(bytes(3 * 2**20))
    return model


def test_digest_depends_only_on_the_model_files(folder: Path, tmp_path: Path) -> None:
    before = digest_folder(folder)
    (folder / "image.png").write_bytes(b"not part of the model")
    (folder / "unet" / ".lock").write_bytes(b"")
    assert digest_folder(folder) == before
    assert digest_folder(Path(shutil.copytree(folder, tmp_path / "copy"))) == before
    assert digest_folder(folder, whole=True) != before  # reads large files completely

    weights = bytearray(3 * 2**20)
    weights[-1] = 1
    (folder / "unet" / "weights.dat").write_bytes(weights)
    trained = digest_folder(folder)
    (folder / "unet" / "config.json").write_text('{"a": 1}')
    assert len({before, trained, digest_folder(folder)}) == 3


def test_folder_name_does_not_contain_the_user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    monkeypatch.chdir(folder.parent)
    assert resolve_model("model").name == "~/model"
    assert resolve_model("~/model").source == str(folder)
    assert resolve_model("org/name").kind == "hub"
    with pytest.raises(UsageError, match="which is not a Hub model"):
        resolve_model("~/model", revision="main")
    with pytest.raises(UsageError, match="the model must be a string, a path or None"):
        resolve_model(3)  # type: ignore[arg-type]
