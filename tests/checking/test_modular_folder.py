"""Checks of folders with `modular_model_index.json`: the folder's blocks and the configs of its components."""

import json
import shutil
from pathlib import Path
from typing import Any

import diffusers
import pytest

from anyaccel.checking.check import check
from anyaccel.checking.small_model import make_small_model
from anyaccel.errors import ModelError
from anyaccel.recipes import recipes
from tests.conftest import NEEDS_RECIPES, RunCli

pytestmark = [NEEDS_RECIPES, pytest.mark.filterwarnings("ignore::FutureWarning")]
INDEX = "modular_model_index.json"
LIBRARY: Any = diffusers


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("xl")
    pipe: Any = recipes()["stable-diffusion-xl-modular"].make()
    pipe.save_pretrained(str(folder), overwrite_modular_index=True)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of the folder that a test may change, with the configs only."""
    copied = Path(shutil.copytree(saved, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors")))
    (copied / INDEX).write_text((saved / INDEX).read_text().replace(str(saved), str(copied)))
    return copied


def write_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_modular_folder_is_checked_without_its_weights(folder: Path, run_cli_forked: RunCli) -> None:
    report = check(folder, ["mps", "neuron"])
    assert report.passes, str(report)
    assert report.pipeline == "StableDiffusionXLModularPipeline"
    assert report.notes == (
        "small model built from the configs, with random weights and the sizes of the recipe "
        "stable-diffusion-xl-modular",
    )
    done = run_cli_forked("check", str(folder), "-d", "mps", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["devices"]["mps"]["passes"] is True


def test_structure_and_options_come_from_the_folder(folder: Path) -> None:
    write_json(folder / "unet" / "config.json", use_linear_projection=True)
    write_json(folder / "scheduler" / "scheduler_config.json", timestep_spacing="trailing")
    write_json(folder / INDEX, force_zeros_for_empty_prompt=False)
    pipe: Any = make_small_model(folder).recipe.make()
    assert isinstance(pipe.blocks, LIBRARY.StableDiffusionXLAutoBlocks)
    assert pipe.unet.config.use_linear_projection is True
    assert pipe.scheduler.config.timestep_spacing == "trailing"
    assert pipe.config.force_zeros_for_empty_prompt is False


def test_a_component_without_a_config_is_that_of_the_recipe(folder: Path) -> None:
    shutil.rmtree(folder / "vae")
    small = make_small_model(folder)
    assert small.notes[1:] == ("vae: no config found; using AutoencoderKL of the recipe",)


def test_blocks_that_the_recipe_leaves_out_are_listed(tmp_path: Path) -> None:
    pipe: Any = recipes()["wan-modular"].make()
    pipe.save_pretrained(str(tmp_path), overwrite_modular_index=True)
    assert check(tmp_path, "neuron").notes[1:] == ("the recipe leaves out the blocks text_encoder",)


def test_custom_blocks_are_not_run(folder: Path) -> None:
    (folder / "block.py").write_text("raise SystemExit('this must never run')\n")
    (folder / "modular_config.json").write_text(json.dumps({"auto_map": {"ModularPipelineBlocks": "block.Own"}}))
    with pytest.raises(ModelError, match="contains custom code") as caught:
        check(folder, "mps")
    assert "package.module:make" in caught.value.hint


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot read"),
        ('{"_class_name": "NobodysModularPipeline", "_blocks_class_name": "NobodysBlocks"}', "NobodysModularPipeline"),
        ('{"_class_name": "FluxModularPipeline", "_blocks_class_name": "FluxAutoBlocks"}', "names no folder"),
    ],
)
def test_an_invalid_index_raises(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(ModelError, match=message) as caught:
        check(tmp_path, "mps")
    assert caught.value.hint
