"""Files of LoRA, IP-Adapter and textual inversion weights: damaged and unsafe ones are rejected by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import anyaccel
from anyaccel.errors import ModelError, ModelFileError
from anyaccel.recipes import recipes
from tests.conftest import NEEDS_RECIPES
from tests.runtime.weight_files.test_checks import CONTENTS, RunsCode

pytestmark = NEEDS_RECIPES
PLACEMENTS = [None, "cpu"]


def make(device: str | None) -> Any:
    pipe = anyaccel.DiffusionPipeline.from_pipe(recipes()["stable-diffusion"].make())
    return pipe if device is None else pipe.to(device)


def load(pipe: Any, method: str, file: Path, *, by_name: bool = False) -> None:
    """Load a file, as a path or as a folder with the name of the file."""
    arguments: dict[str, Any] = {"token": "<fox>"} if method == "load_textual_inversion" else {}
    if method == "load_ip_adapter":
        arguments = {"subfolder": "", "weight_name": file.name, "image_encoder_folder": None}
    elif by_name:
        arguments["weight_name"] = file.name
    is_folder = by_name or method == "load_ip_adapter"
    getattr(pipe, method)(str(file.parent if is_folder else file), **arguments)


@pytest.mark.parametrize("name", ["empty", "HTML", "pickle", "truncated", "GGUF", "dtype"])
@pytest.mark.parametrize("method", ["load_lora_weights", "load_ip_adapter", "load_textual_inversion"])
def test_damaged_files_are_named(method: str, name: str, tmp_path: Path) -> None:
    content, message = CONTENTS[name]
    file = tmp_path / "weights.safetensors"
    file.write_bytes(content)
    pipe = make("cpu")
    for by_name in (False, True):
        with pytest.raises(ModelFileError, match=message) as caught:
            load(pipe, method, file, by_name=by_name)
        assert str(file) in caught.value.message


@pytest.mark.parametrize("device", PLACEMENTS)
@pytest.mark.parametrize("method", ["load_lora_weights", "load_ip_adapter", "load_textual_inversion"])
def test_pickles_run_no_code(method: str, device: str | None, tmp_path: Path) -> None:
    file, target = tmp_path / "weights.bin", tmp_path / "created"
    torch.save({"<fox>": RunsCode(target)}, file)
    with pytest.raises(ModelFileError, match="contains objects other than weights") as caught:
        load(make(device), method, file)
    assert str(file) in caught.value.message
    assert not target.exists()
    with pytest.raises(ModelError, match="are pickled"):
        make(device).load_textual_inversion(str(file), token="<fox>", use_safetensors=True)


@pytest.mark.parametrize("suffix", ["bin", "safetensors"])
def test_textual_inversions_are_loaded(suffix: str, tmp_path: Path) -> None:
    pipe = make("cpu")
    embedding = torch.ones(pipe.text_encoder.config.hidden_size)
    file = tmp_path / f"fox.{suffix}"
    if suffix == "bin":
        torch.save({"<fox>": embedding}, file)
    else:
        save_file({"<fox>": embedding}, file)
    load(pipe, "load_textual_inversion", file)
    token = pipe.tokenizer.convert_tokens_to_ids("<fox>")
    assert torch.equal(pipe.text_encoder.get_input_embeddings().weight[token], embedding)


def test_other_arguments_are_checked_by_diffusers(tmp_path: Path) -> None:
    pipe = make("cpu")
    with pytest.raises(TypeError):
        pipe.load_lora_weights()
    with pytest.raises(OSError, match="missing"):
        pipe.load_lora_weights(str(tmp_path), weight_name="missing.safetensors")
    (tmp_path / "weights.txt").write_bytes(b"1")
    with pytest.raises(ModelError, match=r"weights\.txt is not a file of weights"):
        pipe.load_lora_weights(str(tmp_path / "weights.txt"))
