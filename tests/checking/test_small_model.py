"""Small models from config files: the structure and options of the model, without weights."""

import json
from pathlib import Path
from typing import Any

import pytest

from anyaccel.checking.check import check, find_devices
from anyaccel.checking.small_model import make_small_model, merge_config
from anyaccel.errors import ModelError
from anyaccel.explanation.known_models import find_bundled_configs, list_bundled_models

SEEDS = [
    "PixArt-alpha/PixArt-XL-2-1024-MS",
    "black-forest-labs/FLUX.1-schnell",
    "black-forest-labs/FLUX.2-klein-4B",
    "stabilityai/sdxl-turbo",
    "stable-diffusion-v1-5/stable-diffusion-v1-5",
]


def test_the_configs_of_the_seed_models_are_bundled() -> None:
    assert list_bundled_models() == SEEDS
    assert find_bundled_configs("nobody/nothing") is None


@pytest.mark.long
@pytest.mark.parametrize("model", SEEDS)
def test_a_seed_model_is_portable(model: str) -> None:
    device = find_devices("all")[SEEDS.index(model)]
    report = check(model, device)
    assert report.passes, str(report)
    assert report.notes[0].startswith("small model built from the configs")
    assert len(report.notes) == 1, "no component is replaced"


@pytest.mark.slow
@pytest.mark.parametrize("model", SEEDS)
def test_a_seed_model_is_portable_everywhere(model: str) -> None:
    assert check(model).passes


def make(model: str) -> Any:
    folder = find_bundled_configs(model)
    assert folder is not None
    return make_small_model(folder).recipe.make()


def test_structure_and_options_come_from_the_model() -> None:
    unet = make("stabilityai/sdxl-turbo").unet
    assert unet.config.down_block_types == ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"]
    assert len(unet.config.block_out_channels) == 3
    assert unet.config.use_linear_projection is True
    assert sum(parameter.numel() for parameter in unet.parameters()) < 5_000_000
    flux = make("black-forest-labs/FLUX.1-schnell")
    assert flux.transformer.config.guidance_embeds is False
    assert flux.scheduler.config.shift == 1.0
    assert len(flux.vae.config.block_out_channels) == 4
    klein = make("black-forest-labs/FLUX.2-klein-4B")
    assert klein.config.is_distilled is True


def test_merged_configs_have_small_sizes_and_the_lengths_of_the_model() -> None:
    model = {
        "types": ["a", "b", "c"],
        "channels": [320, 640, 1280],
        "eps": 1e-6,
        "bias": False,
        "heads": 8,
        "act": "gelu",
    }
    tiny = {"types": ["x", "y"], "channels": [4, 8], "eps": 1e-5, "bias": True, "heads": 2, "act": "silu", "layers": 1}
    assert merge_config(model, tiny) == {
        "types": ["a", "b", "c"],
        "channels": [4, 8, 8],
        "eps": 1e-6,
        "bias": False,
        "heads": 2,
        "act": "gelu",
        "layers": 1,
    }


@pytest.mark.parametrize("content", ["{", "[]", json.dumps({"_class_name": "NobodysPipeline"})])
def test_an_invalid_model_folder_raises(tmp_path: Path, content: str) -> None:
    (tmp_path / "model_index.json").write_text(content)
    with pytest.raises(ModelError) as caught:
        check(str(tmp_path), "mps")
    assert caught.value.hint
