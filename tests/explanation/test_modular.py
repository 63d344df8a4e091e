"""`explain` with the folder of a modular pipeline, from the index and the configs only."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import anyaccel
from anyaccel.errors import ModelError
from anyaccel.explanation.model_configs import find_model
from anyaccel.recipes import recipes
from tests.conftest import NEEDS_RECIPES, RunCli

pytestmark = [NEEDS_RECIPES, pytest.mark.filterwarnings("ignore::FutureWarning")]
INDEX = "modular_model_index.json"
XL = "stable-diffusion-xl-modular"
PUBLISHED = "stabilityai/sdxl-turbo"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pipe: Any = recipes()[XL].make()
    folder = tmp_path_factory.mktemp("xl")
    pipe.save_pretrained(str(folder), overwrite_modular_index=True)
    return folder


@pytest.fixture
def own_folder(folder: Path, tmp_path: Path) -> Path:
    """A copy of the folder that a test may change."""
    return Path(shutil.copytree(folder, tmp_path / "model"))


def change_index(folder: Path, change: Any) -> None:
    index = json.loads((folder / INDEX).read_text())
    for name, value in index.items():
        if isinstance(value, list) and value[0] is not None:
            change(name, value[2])
    (folder / INDEX).write_text(json.dumps(index))


def test_the_components_of_the_folder(own_folder: Path, tmp_path: Path) -> None:
    """The configs may be in another folder, and the weights are not needed."""
    models = ["unet", "vae", "text_encoder", "text_encoder_2"]
    before = find_model(own_folder)
    assert before.pipeline == "StableDiffusionXLModularPipeline"
    assert {component.name for component in before.components if component.config is not None} == {*models, "scheduler"}
    assert before.missing_bytes(models) == 0
    shutil.move(own_folder / "unet", tmp_path / "denoiser")

    def change(name: str, options: dict[str, Any]) -> None:
        if name == "unet":
            options |= {"pretrained_model_name_or_path": str(tmp_path), "subfolder": "denoiser"}

    change_index(own_folder, change)
    after = find_model(own_folder)
    assert after.find_folder("unet") == tmp_path / "denoiser"
    assert [component.config for component in after.components] == [component.config for component in before.components]
    assert after.missing_bytes(models) == 0
    for weights in tmp_path.rglob("*.safetensors"):
        weights.unlink()
    assert find_model(own_folder).missing_bytes(models) is None


def test_same_memory_as_the_plain_pipeline(own_folder: Path, run_cli_forked: RunCli) -> None:
    """The index names a published repository, whose configs are included in the package."""
    for component in [entry for entry in own_folder.iterdir() if entry.is_dir()]:
        shutil.rmtree(component)
    change_index(own_folder, lambda name, options: options.update(pretrained_model_name_or_path=PUBLISHED))
    command = run_cli_forked("explain", str(own_folder), "--device", "cuda:16GiB", "--size", "512", "--json")
    assert command.returncode == 0
    modular = json.loads(command.stdout)
    plain = anyaccel.explain(PUBLISHED, "cuda:16GiB", width=512, height=512).to_dict()
    assert modular["pipeline"] == "StableDiffusionXLModularPipeline"
    assert dict(modular["components"]) == dict(plain["components"])
    assert modular["largest_size"] == list(plain["largest_size"])
    assert modular["peak_bytes"] == pytest.approx(plain["peak_bytes"], rel=0.01)


def test_errors(own_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=INDEX):
        anyaccel.explain(tmp_path / "empty", "mps")
    shutil.rmtree(own_folder / "unet")
    change_index(own_folder, lambda name, options: options.update(pretrained_model_name_or_path=str(own_folder)))
    with pytest.raises(ModelError, match="unet"):
        anyaccel.explain(own_folder, "mps")
    (own_folder / "modular_config.json").write_text(json.dumps({"auto_map": {"ModularPipelineBlocks": "block.Own"}}))
    with pytest.raises(ModelError, match="custom code"):
        anyaccel.explain(own_folder, "mps")
    (own_folder / INDEX).write_text("{")
    with pytest.raises(ModelError, match=INDEX):
        anyaccel.explain(own_folder, "mps")
