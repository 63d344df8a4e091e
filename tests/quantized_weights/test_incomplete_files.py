"""Files with 8-bit weights whose scales are elsewhere, missing or damaged: no code is used without its scale."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import anyaccel
from anyaccel.errors import ModelError, ModelFileError
from anyaccel.quantized_weights.replace_layers import list_formats
from tests.conftest import NEEDS_RECIPES
from tests.quantized_weights.quantizers import RECIPE
from tests.quantized_weights.scaled_files import quantize, write_scaled_file
from tests.quantized_weights.test_scaled_files import check_weights

pytestmark = NEEDS_RECIPES
FILE = "transformer/diffusion_pytorch_model.safetensors"
ENCODER = "text_encoder_2/model.safetensors"
LAYER = "transformer_blocks.0.attn.to_q"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flux")
    pipe: Any = RECIPE.make()
    pipe.save_pretrained(folder)
    return folder


def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "folder"))


def load(model: Any, **options: Any) -> Any:
    return anyaccel.DiffusionPipeline.from_pretrained(model, dtype="float32", **options)


def split_into_shards(file: Path, is_first: Callable[[str], bool]) -> None:
    """Replace a file by two shards with an index."""
    tensors = load_file(file)
    files: dict[str, str] = {}
    file.unlink()
    for number in (1, 2):
        part = {name: tensor for name, tensor in tensors.items() if is_first(name) is (number == 1)}
        shard = f"{file.stem}-0000{number}-of-00002.safetensors"
        save_file(part, file.parent / shard, metadata={"format": "pt"})
        files |= dict.fromkeys(part, shard)
    (file.parent / f"{file.name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def check_encoder(model: Any, values: Tensors) -> None:
    assert list_formats(model).keys() == {"fp8-e4m3"}
    name = "encoder.block.0.layer.0.SelfAttention.q.weight"
    assert torch.equal(model.get_submodule(name.removesuffix(".weight")).weight, values[name])


@pytest.mark.parametrize("layout", ["comfyui-2025", "blocks"])
def test_scales_in_another_shard_than_the_weights(layout: str, saved: Path, tmp_path: Path) -> None:
    folder = copy(saved, tmp_path)
    values: dict[str, Tensors] = {}
    for name in (FILE, ENCODER):
        values[name] = write_scaled_file(saved / name, folder / name, torch.float8_e4m3fn, layout)
        split_into_shards(folder / name, lambda tensor: "scale" in tensor)
    pipe = load(folder)
    check_weights(pipe.transformer, values[FILE], "fp8-e4m3")
    check_encoder(pipe.text_encoder_2, values[ENCODER])


def test_an_unsupported_format_in_another_shard(saved: Path, tmp_path: Path) -> None:
    folder = copy(saved, tmp_path)
    write_scaled_file(saved / FILE, folder / FILE, torch.float8_e4m3fn, "rows")
    save_file(load_file(folder / FILE) | {f"{LAYER}.weight_scale_2": torch.ones(())}, folder / FILE)
    split_into_shards(folder / FILE, lambda tensor: "scale" in tensor)
    with pytest.raises(ModelError, match="with `weight_scale_2`"):
        load(folder)


@pytest.mark.parametrize("other", ["model.fp8.safetensors", "t5xxl_fp8.safetensors"])
def test_8bit_files_that_are_not_loaded_are_not_used(other: str, saved: Path, tmp_path: Path) -> None:
    folder, encoder = copy(saved, tmp_path), load_file(saved / ENCODER)
    changed = tmp_path / "changed.safetensors"
    save_file({name: tensor * 3 for name, tensor in encoder.items()}, changed)
    values = write_scaled_file(changed, folder / "text_encoder_2" / other, torch.float8_e4m3fn, "comfyui")
    plain = load(folder).text_encoder_2
    assert list_formats(plain) == {}
    assert all(torch.equal(tensor, encoder[name]) for name, tensor in plain.state_dict().items() if name in encoder)
    if other == "model.fp8.safetensors":
        check_encoder(load(folder, variant="fp8").text_encoder_2, values)


def test_a_config_without_quantization(saved: Path, tmp_path: Path) -> None:
    folder = copy(saved, tmp_path)
    values = write_scaled_file(saved / FILE, folder / FILE, torch.float8_e4m3fn, "comfyui")
    config = folder / "transformer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": None}))
    check_weights(load(folder).transformer, values, "fp8-e4m3")


def test_a_file_next_to_the_config_of_another_model(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "bitsandbytes"}}')
    file = tmp_path / "flux.safetensors"
    values = write_scaled_file(saved / FILE, file, torch.float8_e4m3fn, "comfyui")
    check_weights(load(saved, transformer=file).transformer, values, "fp8-e4m3")


def test_text_encoders_of_a_hub_id(saved: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--tests--tiny"
    shutil.copytree(saved, repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    file = repository / "snapshots" / "abc" / ENCODER
    values = write_scaled_file(saved / ENCODER, file, torch.float8_e4m3fn, "comfyui")
    pipe = load("tests/tiny", cache_dir=str(tmp_path), local_files_only=True)
    check_encoder(pipe.text_encoder_2, values)


@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: {name: tensor for name, tensor in tensors.items() if "block.1" not in name},
        lambda tensors: {f"other.{name}": tensor for name, tensor in tensors.items()},
        lambda tensors: tensors | {"shared.weight": torch.ones(5, 32)},
    ],
    ids=["missing", "names", "shape"],
)
def test_a_text_encoder_needs_all_weights(
    change: Callable[[Tensors], Tensors], is_quantized: bool, saved: Path, tmp_path: Path
) -> None:
    file, tensors = tmp_path / "t5.safetensors", change(load_file(saved / ENCODER))
    save_file(quantize(tensors, torch.float8_e4m3fn, "rows") if is_quantized else tensors, file)
    with pytest.raises(ModelFileError, match=r"t5\.safetensors lacks \d+ weights of T5EncoderModel, such as "):
        load(saved, text_encoder_2=file)


def test_a_folder_with_8bit_weights_needs_all_weights(saved: Path, tmp_path: Path) -> None:
    folder = copy(saved, tmp_path)
    tensors = quantize(load_file(saved / FILE), torch.float8_e4m3fn, "rows")
    save_file({name: tensor for name, tensor in tensors.items() if not name.startswith(LAYER)}, folder / FILE)
    with pytest.raises(ModelFileError, match="transformer lacks 2 weights of FluxTransformer2DModel, such as "):
        load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.ones(32, 32, dtype=torch.int8), "weight_scale": None}, "int8 without a scale"),
        ({"weight_scale": torch.full((32, 1), 127, dtype=torch.uint8)}, "scales of the dtype torch.uint8"),
        ({"weight_scale": torch.empty(0)}, r"scales of the dtype torch.float32 and the shape \(0,\)"),
        ({"comfy_quant": torch.tensor(list(b"{bad"), dtype=torch.uint8)}, "the quantization cannot be read"),
        ({"comfy_quant": torch.tensor(list(b"[1]"), dtype=torch.uint8)}, "the quantization cannot be read"),
        ({"comfy_quant": torch.ones(3)}, "the quantization cannot be read"),
        ('{"layers": [1]}', "the quantization cannot be read"),
        ('{"layers": null}', "the quantization cannot be read"),
    ],
)
def test_scales_that_cannot_be_read(
    change: dict[str, torch.Tensor | None] | str, message: str, saved: Path, tmp_path: Path
) -> None:
    file, tensors = tmp_path / "flux.safetensors", quantize(load_file(saved / FILE), torch.float8_e4m3fn, "rows")
    metadata = {"_quantization_metadata": change} if isinstance(change, str) else None
    for name, value in change.items() if isinstance(change, dict) else ():
        tensors.pop(f"{LAYER}.{name}", None)
        if value is not None:
            tensors[f"{LAYER}.{name}"] = value
    save_file(tensors, file, metadata=metadata)
    with pytest.raises(ModelError, match=message) as caught:
        load(saved, transformer=file)
    assert str(file) in caught.value.message
    assert caught.value.hint


def test_int8_weights_of_a_text_encoder_need_scales(saved: Path, tmp_path: Path) -> None:
    folder = copy(saved, tmp_path)
    codes = quantize(load_file(saved / ENCODER), torch.int8, "rows")
    plain = {name: tensor for name, tensor in codes.items() if "scale" not in name}
    save_file(plain, folder / ENCODER, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="int8 without a scale"):
        load(folder)
