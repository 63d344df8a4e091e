"""The folder from which clients add LoRAs: names that it has, and files that are not LoRAs."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from anyaccel.errors import UnknownLoraError, UsageError
from anyaccel.server.worker.lora_folder import check_lora, find_lora, list_loras


def test_only_names_in_the_folder_are_known(tmp_path: Path) -> None:
    folder = tmp_path / "loras"
    folder.mkdir()
    save_file({"unet.lora_A.weight": torch.zeros(2, 2)}, folder / "ink.v1.safetensors")
    save_file({"unet.lora_A.weight": torch.zeros(2, 2)}, tmp_path / "private.safetensors")
    (folder / "link.safetensors").symlink_to(tmp_path / "private.safetensors")
    assert list_loras(folder) == ["ink.v1"]
    check_lora(find_lora(folder, "ink.v1"))
    for name in ("../private", "link", "ink", ""):
        with pytest.raises(UnknownLoraError):
            find_lora(folder, name)
    with pytest.raises(UnknownLoraError) as caught:
        find_lora(folder, "ink.v2")
    assert "ink.v1" in caught.value.hint


def test_a_file_without_lora_weights_is_known_but_not_valid(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(UsageError) as caught:
        check_lora(find_lora(tmp_path, "model"))
    assert not isinstance(caught.value, UnknownLoraError)
