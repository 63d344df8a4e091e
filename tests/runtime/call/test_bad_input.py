"""Invalid input raises an `AnyaccelError` with a hint before any model runs, and the pipeline stays usable."""

import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import diffusers
import numpy
import pytest
import torch

import anyaccel
from anyaccel.errors import ModelError
from anyaccel.recipes import recipes
from tests.conftest import NEEDS_RECIPES

pytestmark = NEEDS_RECIPES
CALL: dict[str, Any] = {"num_inference_steps": 1, "height": 16, "width": 16, "output_type": "np"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("saved")
    pipe: Any = recipes()["stable-diffusion"].make()
    pipe.save_pretrained(path)
    return path


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"height": 17}, "divisible by 8"),
        ({"height": 18}, "divisible by 8"),
        ({"width": -8}, "an integer from 1 to 16384 pixels, not -8"),
        ({"num_inference_steps": 0}, "a positive integer"),
        ({"num_inference_steps": -3}, "a positive integer"),
        ({"seed": [1, 2]}, "got 2 seeds for 1 image"),
        ({"seed": [1], "num_images_per_prompt": 2}, "got 1 seed for 2 images"),
        ({"seed": []}, "0 seeds"),
        ({"seed": "seven"}, "a seed must be an integer"),
        ({"seed": -1}, "a seed must be an integer"),
        ({"seed": True}, "a seed must be an integer"),
        ({"seed": 1.5}, "a seed must be an integer"),
        ({"seed": 1, "generator": torch.Generator()}, "seed and generator cannot be used together"),
        ({"prompt": ["a"] * 3, "generator": [torch.Generator()] * 2}, "list of generators of length"),
        ({"num_images_per_prompt": 2, "generator": [torch.Generator()]}, "list of generators of length"),
        ({"generator": [torch.Generator()] * 2}, "list of generators of length"),
        ({"prompt": 5}, "prompt"),
        ({"prompt_embeds": torch.ones(1, 4, 8)}, "prompt_embeds"),
    ],
)
def test_invalid_calls_fail_before_a_model_runs(arguments: dict[str, Any], message: str) -> None:
    pipe = anyaccel.place(recipes()["stable-diffusion"].make(), "cpu", dtype="fp32")
    passes: list[int] = []
    pipe.unet.register_forward_hook(lambda *args: passes.append(1))
    pipe.set_progress_bar_config(disable=True)
    with pytest.raises(anyaccel.AnyaccelError, match=message) as caught:
        pipe(**{"prompt": "a fox", **CALL, **arguments})
    assert caught.value.hint
    assert passes == []
    assert numpy.isfinite(pipe("a fox", seed=1, **CALL).images).all()


def test_an_unknown_argument_raises_type_error() -> None:
    pipe = anyaccel.place(recipes()["flux"].make(), "cpu", dtype="fp32")
    with pytest.raises(TypeError, match="promt"):
        pipe("a fox", promt="a fox")


def load(path: Any, **options: Any) -> Any:
    return anyaccel.DiffusionPipeline.from_pretrained(path, **options)


def test_a_folder_without_a_pipeline_is_rejected_with_a_hint(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no model_index\.json") as caught:
        load(folder / "unet")
    assert "pass the pipeline folder above it" in str(caught.value)
    with pytest.raises(ModelError, match=r"no model_index\.json") as caught:
        load(tmp_path)
    assert str(folder) in str(caught.value)
    for missing in ("./nowhere", "/nowhere/at/all", "no-such-org/no-such-model"):
        with pytest.raises(ModelError, match=r"nowhere|no-such-model"):
            load(missing)
    with pytest.raises(anyaccel.AnyaccelError, match="the model must be a string or a Path"):
        load(None)
    (folder / "model_index.json").write_text("{")
    with pytest.raises(ModelError, match="cannot read"):
        load(folder)


def test_missing_files_raise_an_os_error_as_in_diffusers(folder: Path, tmp_path: Path) -> None:
    (folder / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    for model in (folder, tmp_path, "/nowhere/at/all", "no-such-org/no-such-model"):
        with pytest.raises(OSError, match=r"hint: ") as caught:
            load(model)
        assert isinstance(caught.value, ModelError)


def test_models_can_be_passed_by_the_names_of_diffusers(folder: Path) -> None:
    assert anyaccel.DiffusionPipeline.from_pretrained(pretrained_model_name_or_path=folder)
    assert anyaccel.AutoPipelineForText2Image.from_pretrained(pretrained_model_or_path=folder)
    for load_pipeline, stock in (
        (anyaccel.DiffusionPipeline.from_pretrained, diffusers.DiffusionPipeline.from_pretrained),
        (anyaccel.AutoPipelineForText2Image.from_pretrained, diffusers.AutoPipelineForText2Image.from_pretrained),
        (anyaccel.DiffusionPipeline.from_single_file, diffusers.StableDiffusionPipeline.from_single_file),
    ):
        assert next(iter(inspect.signature(load_pipeline).parameters)) == next(
            iter(inspect.signature(stock).parameters)
        )


def test_truncated_weights_are_rejected(folder: Path) -> None:
    weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
    whole = weights.read_bytes()
    for length in (len(whole) - 1, len(whole) // 2, 100, 4, 0):
        weights.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"is truncated|not a valid safetensors file|is empty") as caught:
            load(folder)
        assert "copy or download the file again" in str(caught.value)
    weights.write_bytes(whole)
    assert load(folder)


def test_pickled_weights_need_use_safetensors_false(folder: Path) -> None:
    pipe: Any = recipes()["stable-diffusion"].make()
    for name, file in {
        "unet": "diffusion_pytorch_model",
        "vae": "diffusion_pytorch_model",
        "text_encoder": "model",
    }.items():
        (folder / name / f"{file}.safetensors").unlink()
        pickled = file.replace("model", "pytorch_model") if name == "text_encoder" else file
        torch.save(getattr(pipe, name).state_dict(), folder / name / f"{pickled}.bin")
    with pytest.raises(ModelError, match="are pickled") as caught:
        load(folder)
    assert "use_safetensors=False" in str(caught.value)
    assert load(folder, use_safetensors=False).unet is not None


def test_a_folder_of_optimum_habana_is_rejected_with_the_class_to_use(folder: Path) -> None:
    index = folder / "model_index.json"
    content = json.loads(index.read_text())
    index.write_text(json.dumps({**content, "_class_name": "GaudiStableDiffusionPipeline"}))
    with pytest.raises(ModelError, match="Optimum for Intel Gaudi") as caught:
        load(folder)
    assert '"StableDiffusionPipeline"' in str(caught.value)


def test_custom_code_of_a_model_is_not_run(folder: Path) -> None:
    index = folder / "model_index.json"
    content = json.loads(index.read_text())
    (folder / "unet" / "my_unet.py").write_text("raise SystemExit('this must never run')\n")
    index.write_text(json.dumps({**content, "unet": ["my_unet", "MyUNet"]}))
    with pytest.raises(ModelError, match="contains custom code"):
        load(folder)
    index.write_text(json.dumps({**content, "_class_name": ["pipeline", "MyPipeline"]}))
    with pytest.raises(ModelError, match="contains custom code"):
        load(folder)
    index.write_text(json.dumps(content))
    with pytest.raises(ModelError, match="would run code"):
        load(folder, custom_pipeline=str(folder / "unet" / "my_unet.py"))


def test_invalid_dtype_arguments_are_rejected(folder: Path) -> None:
    with pytest.raises(anyaccel.AnyaccelError, match="dtype and torch_dtype cannot be used together"):
        load(folder, dtype=torch.float32, torch_dtype=torch.float32)
    with pytest.raises(anyaccel.AnyaccelError, match="unknown dtype 'float33'"):
        load(folder, dtype="float33")


def test_a_call_on_a_device_that_disappeared(monkeypatch: pytest.MonkeyPatch) -> None:
    from anyaccel.runtime.call import validation

    pipe = anyaccel.place(recipes()["stable-diffusion"].make(), "cpu", dtype="fp32")
    monkeypatch.setattr(validation, "is_available", lambda device: False)
    with pytest.raises(anyaccel.AnyaccelError, match="cpu:0 is no longer available"):
        pipe("a fox", **CALL)
