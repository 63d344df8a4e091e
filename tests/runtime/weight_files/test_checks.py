"""Files of weights that are damaged, mislabelled or unsafe: rejected by name, and without running code."""

import io
import json
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

import anyaccel
from anyaccel.errors import ModelError, ModelFileError
from anyaccel.recipes import recipes
from anyaccel.runtime.weight_files.checks import check_weight_file
from tests.conftest import NEEDS_RECIPES

pytestmark = NEEDS_RECIPES
UNET = "unet/diffusion_pytorch_model.safetensors"


class RunsCode:
    """An object whose pickle creates a file when it is loaded."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    pipe: Any = recipes()["stable-diffusion"].make()
    pipe.save_pretrained(folder)
    return folder


def make_header(header: dict[str, Any], data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def make_zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("data.txt", "weights")
    return buffer.getvalue()


def tensor(begin: int, end: int, **more: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [(end - begin) // 4], "data_offsets": [begin, end]} | more


CONTENTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 7\n", "is a Git LFS pointer"),
    "HTML": (b"\n<!DOCTYPE html><html><body>Sign in</body></html>", "is an HTML page"),
    "error": (b'{"error":"Repository not found"}', "is an error message"),
    "pickle": (pickle.dumps({"a": 1}), "is a pickle, although its suffix is .safetensors"),
    "ZIP": (make_zip(), "is a pickle, although its suffix is .safetensors"),
    "GGUF": (b"GGUF\x03\0\0\0", "is a gguf file, although its suffix is .safetensors"),
    "text": (b"these are no weights at all", "is not a valid safetensors file"),
    "no JSON": (struct.pack("<Q", 4) + b"{{{{", "is not a valid safetensors file"),
    "truncated": (make_header({"a": tensor(0, 400)}, b"\0" * 300), "is truncated: it has [0-9,]+ bytes, but"),
    "too long": (make_header({"a": tensor(0, 8)}, b"\0" * 12), "is damaged"),
    "overlapping": (make_header({"a": tensor(0, 8), "b": tensor(4, 12)}, b"\0" * 12), "b: overlaps another tensor"),
    "gap": (make_header({"a": tensor(0, 8), "b": tensor(12, 16)}, b"\0" * 16), "b: leaves a gap"),
    "dtype": (make_header({"a": tensor(0, 8, dtype="F12")}, b"\0" * 8), "a: unknown dtype F12"),
    "shape": (make_header({"a": tensor(0, 8, shape=[3])}, b"\0" * 8), r"a: 8 bytes for the shape \[3\]"),
    "no offsets": (make_header({"a": {"dtype": "F32", "shape": [2]}}), "no 'data_offsets'"),
    "list": (struct.pack("<Q", 2) + b"[]", "not a JSON object"),
    "nested": (struct.pack("<Q", 10**5) + b"[" * 10**5, "maximum recursion depth"),
    "text offsets": (make_header({"a": tensor(0, 8, data_offsets=["0", "8"])}, b"\0" * 8), "tensor a"),
    "infinite shape": (make_header({"a": tensor(0, 8, shape=[float("inf")])}, b"\0" * 8), "tensor a"),
    "negative shape": (make_header({"a": tensor(0, 8, shape=[-1, -2])}, b"\0" * 8), "not a valid safetensors file"),
    "fraction": (make_header({"a": tensor(0, 8, shape=[2.7])}, b"\0" * 8), "not a valid safetensors file"),
    "metadata": (make_header({"__metadata__": {"a": 5}}), "not a valid safetensors file"),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_a_damaged_file_is_rejected_by_name(name: str, saved: Path, tmp_path: Path) -> None:
    content, message = CONTENTS[name]
    file = tmp_path / "weights.safetensors"
    file.write_bytes(content)
    with pytest.raises(ModelFileError, match=message) as caught:
        anyaccel.DiffusionPipeline.from_pretrained(file, config=saved)
    assert str(file) in caught.value.message
    assert caught.value.hint
    with pytest.raises(ModelFileError, match=message):
        anyaccel.DiffusionPipeline.from_pretrained(saved, unet=file)
    folder = Path(shutil.copytree(saved, tmp_path / "model"))
    (folder / UNET).write_bytes(content)
    with pytest.raises(ModelFileError, match=message) as caught:
        anyaccel.DiffusionPipeline.from_pretrained(folder)
    assert str(folder / UNET) in caught.value.message


@pytest.mark.parametrize("suffix", [".bin", ".ckpt", ".pt", ".pth"])
def test_pickles_are_rejected_and_run_no_code(suffix: str, saved: Path, tmp_path: Path) -> None:
    file, target = tmp_path / f"weights{suffix}", tmp_path / "created"
    for write in (lambda value: file.write_bytes(pickle.dumps(value)), lambda value: torch.save(value, file)):
        write({"state_dict": {"weight": RunsCode(target)}})
        for arguments in ((file, {"config": saved}), (saved, {"unet": file})):
            with pytest.raises(ModelError, match="are pickled") as caught:
                anyaccel.DiffusionPipeline.from_pretrained(arguments[0], **arguments[1])
            assert str(file) in caught.value.message
        # Also when the user trusts the file: `weights_only=True` of torch.
        with pytest.raises(ModelFileError, match="cannot load"):
            anyaccel.DiffusionPipeline.from_pretrained(file, config=saved, use_safetensors=False)
    assert not target.exists()
    torch.save({"weight": RunsCode(target)}, file)
    torch.load(file, weights_only=False)
    assert target.exists()


def test_safetensors_with_the_suffix_of_a_pickle(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2)}, tmp_path / "weights.bin")
    with pytest.raises(ModelFileError, match=r"is a safetensors file, although its suffix is \.bin") as caught:
        check_weight_file(tmp_path / "weights.bin", pickles=True)
    assert caught.value.hint == "rename the file"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "loop.safetensors").symlink_to(tmp_path / "loop.safetensors")
    (tmp_path / "secret.safetensors").write_bytes(make_header({}))
    (tmp_path / "secret.safetensors").chmod(0)
    problems = {
        "folder": "folder.safetensors is not a file",
        "loop": "loop.safetensors is a link to a file that does not exist",
        "x" * 300: "cannot read .*: File name too long",
    }
    if os.geteuid() != 0:  # root can read every file
        problems["secret"] = "cannot read .*secret.safetensors: Permission denied"
    for name, message in problems.items():
        with pytest.raises(ModelFileError, match=message):
            check_weight_file(tmp_path / f"{name}.safetensors", pickles=False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[" * 10**5, "maximum recursion depth"),
        ('{"weight_map": {"a": 5}}', "cannot read"),
        ('{"weight_map": {"a": "../weights.safetensors"}}', r"\.\./weights\.safetensors is not a safetensors file in"),
        ('{"weight_map": {"a": "weights.bin"}}', r"weights\.bin is not a safetensors file in"),
    ],
)
def test_indexes_of_shards(content: str, message: str, saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "model"))
    index = folder / "text_encoder" / "model.safetensors.index.json"
    index.write_text(content)
    target = tmp_path / "created"
    for file in (tmp_path / "model" / "weights.safetensors", index.parent / "weights.bin"):
        torch.save({"a": RunsCode(target)}, file)
    (folder / "weights.safetensors").rename(tmp_path / "weights.safetensors")
    with pytest.raises(ModelFileError, match=message) as caught:
        anyaccel.DiffusionPipeline.from_pretrained(folder)
    assert str(index) in caught.value.message
    assert not target.exists()


@pytest.mark.parametrize("content", [b"", b"[]", b"[" * 10**5, b"\xff"])
@pytest.mark.parametrize("component", ["unet", "text_encoder"])
def test_damaged_configs(component: str, content: bytes, saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "model"))
    config = folder / component / "config.json"
    config.write_bytes(content)
    with pytest.raises(ModelFileError, match="cannot read") as caught:
        anyaccel.DiffusionPipeline.from_pretrained(folder)
    assert str(config) in caught.value.message


def test_missing_files_are_named(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"unet\.safetensors is missing"):
        anyaccel.DiffusionPipeline.from_pretrained(saved, unet=tmp_path / "unet.safetensors")
    (tmp_path / "weights.sft").write_bytes(b"1")
    with pytest.raises(ModelError, match=r"weights\.sft is not a file of weights: its suffix"):
        anyaccel.DiffusionPipeline.from_pretrained(tmp_path / "weights.sft")
    folder = Path(shutil.copytree(saved, tmp_path / "model"))
    pipe: Any = recipes()["stable-diffusion"].make()
    (folder / UNET).unlink()
    pipe.unet.save_pretrained(folder / "unet", max_shard_size="100KB")
    shards = sorted(folder.glob("unet/*.safetensors"))
    assert len(shards) > 1
    anyaccel.DiffusionPipeline.from_pretrained(folder)
    shards[0].unlink()
    with pytest.raises(ModelFileError, match=f"unet lacks {shards[0].name}: .* lists {len(shards)} files"):
        anyaccel.DiffusionPipeline.from_pretrained(folder)


def test_links_of_the_hub_cache_are_followed(saved: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    shutil.copytree(saved, snapshot)
    blobs.mkdir()
    (snapshot / UNET).rename(blobs / "123")
    (snapshot / UNET).symlink_to("../../../blobs/123")
    anyaccel.DiffusionPipeline.from_pretrained(snapshot)
    (blobs / "123").write_bytes((blobs / "123").read_bytes()[:-100])
    with pytest.raises(ModelFileError, match=r"diffusion_pytorch_model\.safetensors is truncated"):
        anyaccel.DiffusionPipeline.from_pretrained(snapshot)
    (blobs / "123").unlink()
    with pytest.raises(ModelFileError, match="is a link to a file that does not exist"):
        anyaccel.DiffusionPipeline.from_pretrained(snapshot)


def test_a_file_for_another_model(saved: Path, tmp_path: Path) -> None:
    tensors = load_file(saved / UNET)
    del tensors["conv_in.weight"]
    save_file(tensors, tmp_path / "unet.safetensors")
    with pytest.raises(ModelError, match=r"unet\.safetensors"):
        anyaccel.DiffusionPipeline.from_pretrained(saved, unet=tmp_path / "unet.safetensors")
    with pytest.raises(ModelError, match="the pipeline has no model of this name"):
        anyaccel.DiffusionPipeline.from_pretrained(saved, transformer=saved / UNET)
    with pytest.raises(ModelError, match="the pipeline has no model of this name"):
        anyaccel.DiffusionPipeline.from_pretrained(saved, tokenizer=saved / UNET)


@NEEDS_RECIPES
def test_a_file_for_another_architecture(tmp_path: Path) -> None:
    pipe: Any = recipes()["flux"].make()
    pipe.save_pretrained(tmp_path)
    vae = tmp_path / "vae" / "diffusion_pytorch_model.safetensors"
    with pytest.raises(ModelFileError, match=r"does not contain the weights of FluxTransformer2DModel"):
        anyaccel.DiffusionPipeline.from_pretrained(tmp_path, transformer=vae)


@pytest.mark.parametrize("value", ["unet", "model.sft", "MODEL.SAFETENSORS"])
def test_a_component_that_is_not_a_file_of_weights(value: str, saved: Path) -> None:
    with pytest.raises(ModelError, match="is not a file of weights") as caught:
        anyaccel.DiffusionPipeline.from_pretrained(saved, unet=saved / value)
    assert "UNet2DConditionModel" in caught.value.hint


def write_gguf(file: Path, architecture: str, kind: gguf.GGMLQuantizationType) -> None:
    _block, size = gguf.GGML_QUANT_SIZES[kind]
    writer = gguf.GGUFWriter(str(file), architecture)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_tensor("norm.weight", numpy.ones(4, dtype=numpy.float32))
    writer.add_tensor("layer.weight", numpy.zeros((2, size), dtype=numpy.uint8), raw_dtype=kind)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()


@pytest.mark.parametrize("kind", ["IQ2_XS", "IQ1_S", "IQ3_S", "TQ1_0", "TQ2_0", "MXFP4"])
def test_gguf_types_without_dequantization_are_named(kind: str, saved: Path, tmp_path: Path) -> None:
    file = tmp_path / "flux.gguf"
    write_gguf(file, "flux", gguf.GGMLQuantizationType[kind])
    with pytest.raises(ModelError, match=f"GGUF type {kind}, which diffusers cannot dequantize") as caught:
        anyaccel.DiffusionPipeline.from_pretrained(saved, unet=file)
    assert str(file) in caught.value.message
    assert "Q4_K" in caught.value.hint


@pytest.mark.parametrize("architecture", ["llama", "qwen2vl", "t5encoder", "clip"])
def test_gguf_files_of_language_models(architecture: str, saved: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", architecture, gguf.GGMLQuantizationType.Q8_0)
    with pytest.raises(ModelError, match=f"has the weights of a {architecture} model for llama.cpp"):
        anyaccel.DiffusionPipeline.from_pretrained(tmp_path / "model.gguf", config=saved)


def make_gguf(*, fields: bytes = b"", tensors: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, bool(tensors), bool(fields)) + fields + tensors


def make_field(name: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


def change_version(content: bytes) -> bytes:
    return content[:4] + struct.pack("<I", 9) + content[8:]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[:-50], "is truncated"),
        (lambda content: content[:60], "is not a valid GGUF file: the file ends in its header"),
        (lambda content: content[:8], "is not a valid GGUF file: the file ends in its header"),
        (lambda content: content[:8] + b"\xff" * 16 + content[24:], "the header is damaged"),
        (lambda content: make_gguf(fields=make_field("general.alignment", 5, b"\xff" * 4)), "the alignment is -1"),
        (lambda content: make_gguf(fields=make_field("general.alignment", 8, b"\1" + bytes(7) + b"x")), "ment is x"),
        (lambda content: make_gguf(fields=make_field("a", 9, struct.pack("<IQ", 4, 2**60))), "the header is damaged"),
        (lambda content: make_gguf(fields=make_field("a", 9, struct.pack("<IQ", 9, 1) * 9999)), "recursion depth"),
        (change_version, "version 9 of the format is not supported"),
        (lambda content: make_header({}), "is a safetensors file, although its suffix is .gguf"),
        (lambda content: b"<html></html>", "is an HTML page"),
    ],
)
def test_damaged_gguf_files(change: Callable[[bytes], bytes], message: str, saved: Path, tmp_path: Path) -> None:
    file = tmp_path / "flux.gguf"
    write_gguf(file, "flux", gguf.GGMLQuantizationType.Q8_0)
    check_weight_file(file, pickles=False)
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ModelFileError, match=message) as caught:
        anyaccel.DiffusionPipeline.from_pretrained(saved, unet=file)
    assert str(file) in caught.value.message
