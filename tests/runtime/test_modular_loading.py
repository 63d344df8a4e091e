"""Modular pipelines from folders: the same components and images as stock diffusers, on every device."""

import json
import shutil
from pathlib import Path
from typing import Any

import diffusers
import numpy
import pytest
import safetensors.torch
import torch

import anyaccel
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.recipes import recipes, run
from tests.conftest import NEEDS_RECIPES

pytestmark = [NEEDS_RECIPES, pytest.mark.filterwarnings("ignore::FutureWarning")]
LIBRARY: Any = diffusers
XL = "stable-diffusion-xl-modular"
INDEX = "modular_model_index.json"


def save(name: str, folder: Path) -> Path:
    pipe: Any = recipes()[name].make()
    pipe.save_pretrained(str(folder), overwrite_modular_index=True)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(XL, tmp_path_factory.mktemp("xl"))


@pytest.fixture
def own_folder(folder: Path, tmp_path: Path) -> Path:
    """A copy of the folder that a test may change."""
    return Path(shutil.copytree(folder, tmp_path / "model"))


def load_stock(folder: Path, **options: Any) -> Any:
    pipe = LIBRARY.ModularPipeline.from_pretrained(str(folder))
    pipe.load_components(**options)
    return pipe


def draw(pipe: Any, name: str = XL) -> Any:
    return run(recipes()[name], pipe)


@pytest.mark.parametrize("kind", [anyaccel.DiffusionPipeline, anyaccel.ModularPipeline])
def test_a_folder_is_loaded_with_its_components(folder: Path, kind: Any) -> None:
    pipe, stock = kind.from_pretrained(folder, dtype="bfloat16"), load_stock(folder, dtype=torch.bfloat16)
    assert isinstance(pipe, anyaccel.ModularPipeline)
    assert isinstance(pipe, LIBRARY.StableDiffusionXLModularPipeline)
    assert type(pipe).__name__ == "StableDiffusionXLModularPipeline"
    assert {name: type(value) for name, value in pipe.components.items()} == {
        name: type(value) for name, value in stock.components.items()
    }
    assert {pipe.unet.dtype, pipe.vae.dtype, pipe.text_encoder.dtype} == {torch.bfloat16}
    for key, tensor in stock.unet.state_dict().items():
        assert torch.equal(pipe.unet.state_dict()[key], tensor)


@pytest.mark.parametrize("device", ["mps", "neuron"])
def test_same_image_as_stock_diffusers(folder: Path, device: str) -> None:
    expected = draw(load_stock(folder))

    def use(accelerator: VirtualAccelerator) -> Any:
        pipe = anyaccel.DiffusionPipeline.from_pretrained(folder, device=device, dtype="float32")
        placed = anyaccel.ModularPipeline.from_pretrained(folder, dtype="float32").to(device)
        kinds = {pipe.unet.device.type, placed.unet.device.type}
        return kinds, pipe.plan.device, draw(pipe), draw(placed)

    kinds, planned, *images = run_forked(device, use)
    assert kinds == {device}
    assert planned.startswith(device)
    for image in images:
        assert numpy.abs(image - expected).max() < 2e-3


def test_components_move_one_after_the_other(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    utils = LIBRARY.modular_pipelines.modular_pipeline_utils
    load = utils.ComponentSpec.load
    devices: list[str] = []
    loaded: list[Any] = []

    def record(spec: Any, **options: Any) -> Any:
        devices.extend(next(model.parameters()).device.type for model in loaded if isinstance(model, torch.nn.Module))
        loaded[:] = [load(spec, **options)]
        return loaded[0]

    def use(_: VirtualAccelerator) -> set[str]:
        monkeypatch.setattr(utils.ComponentSpec, "load", record)
        pipe = anyaccel.ModularPipeline.from_pretrained(folder, device="npu", dtype="bfloat16")
        assert {pipe.vae.device.type, pipe.unet.device.type} == {"npu"}
        return set(devices)

    assert run_forked("npu", use) == {"npu"}


def test_weights_that_do_not_fit_stay_on_the_host(folder: Path) -> None:
    def use(_: VirtualAccelerator) -> None:
        pipe = anyaccel.ModularPipeline.from_pretrained(folder, device="npu", dtype="bfloat16")
        assert pipe.plan.memory_in_use.value.residence != "resident"
        assert pipe.text_encoder.device.type == "cpu"

    run_forked("npu", use, memory="256KiB")


def test_a_seed_selects_the_image(folder: Path) -> None:
    pipe = anyaccel.ModularPipeline.from_pretrained(folder)
    call = {**recipes()[XL].call()}
    call.pop("generator", None)
    first, second, other = (numpy.asarray(pipe(**call, seed=seed)) for seed in (1, 1, 2))
    assert numpy.array_equal(first, second)
    assert not numpy.array_equal(first, other)


def split(pipe: Any) -> tuple[Any, Any]:
    """Return a pipeline with the text encoder block, and one with the other blocks."""
    blocks = pipe.blocks
    parts = [blocks.sub_blocks.pop("text_encoder").init_pipeline(), blocks.init_pipeline()]
    for part in parts:
        part.update_components(**{name: getattr(pipe, name) for name in part.pretrained_component_names})
    return parts[0], parts[1]


@pytest.mark.parametrize(("prompt", "more"), [(["a fox", "a cat"], {}), ("a fox", {"num_images_per_prompt": 2})])
def test_seeds_of_a_call_that_continues_a_state(prompt: Any, more: dict[str, Any], folder: Path) -> None:
    call = {"num_inference_steps": 2, "height": 16, "width": 16, "output": "images", "output_type": "np", **more}
    encoder, others = split(load_stock(folder))
    generators = [torch.Generator().manual_seed(seed) for seed in (7, 8)]
    expected = others(state=encoder(prompt=prompt), generator=generators, **call)
    encoder, others = split(anyaccel.ModularPipeline.from_pretrained(folder, device="cpu"))
    state = encoder(prompt=prompt)
    assert numpy.array_equal(others(state=state, seed=7, **call), expected)
    with pytest.raises(anyaccel.AnyaccelError, match="3 seeds"):
        others(state=state, seed=[1, 2, 3], **call)


def test_components_by_name(folder: Path) -> None:
    vae = load_stock(folder).vae
    pipe = anyaccel.ModularPipeline.from_pretrained(folder, vae=vae, text_encoder_2=None)
    assert pipe.vae is vae
    assert pipe.text_encoder_2 is None
    assert pipe.text_encoder is not None
    guider = LIBRARY.ClassifierFreeGuidance(guidance_scale=2.0)  # diffusers creates it from a config
    assert anyaccel.ModularPipeline.from_pretrained(folder, names=[], guider=guider).guider is guider
    only = anyaccel.ModularPipeline.from_pretrained(folder, names=["unet", "scheduler"])
    assert {name for name in only.pretrained_component_names if getattr(only, name) is not None} == {
        "unet",
        "scheduler",
    }
    with pytest.raises(anyaccel.AnyaccelError, match="did you mean unet"):
        anyaccel.ModularPipeline.from_pretrained(folder, names=["unett"])


def test_dtypes_by_component(folder: Path) -> None:
    dtypes = {"vae": "fp32", "default": torch.bfloat16, "unet": "float16"}
    pipe = anyaccel.ModularPipeline.from_pretrained(folder, dtype=dtypes)
    assert (pipe.vae.dtype, pipe.unet.dtype, pipe.text_encoder.dtype) == (torch.float32, torch.float16, torch.bfloat16)
    with pytest.raises(anyaccel.AnyaccelError, match="unknown dtype 'float61'"):
        anyaccel.ModularPipeline.from_pretrained(folder, dtype={"vae": "float61"})


def test_a_workflow_loads_only_its_components(folder: Path) -> None:
    pipe = anyaccel.ModularPipeline.from_pretrained(folder, workflow="text2image")
    assert "controlnet" not in pipe.components
    assert pipe.unet is not None


def test_components_from_other_folders(own_folder: Path, tmp_path: Path) -> None:
    """The index names another folder and subfolder for a component."""
    expected = draw(load_stock(own_folder))
    (tmp_path / "other").mkdir()
    shutil.move(own_folder / "unet", tmp_path / "other" / "denoiser")
    index = json.loads((own_folder / INDEX).read_text())
    index["unet"][2] |= {"pretrained_model_name_or_path": str(tmp_path / "other"), "subfolder": "denoiser"}
    (own_folder / INDEX).write_text(json.dumps(index))
    assert numpy.array_equal(draw(anyaccel.DiffusionPipeline.from_pretrained(own_folder)), expected)


def test_a_plain_folder(tmp_path: Path) -> None:
    """As in diffusers, `ModularPipeline` also loads the folder of a plain pipeline."""
    pipe: Any = recipes()["stable-diffusion-xl"].make()
    pipe.save_pretrained(tmp_path)
    assert isinstance(anyaccel.ModularPipeline.from_pretrained(tmp_path), LIBRARY.StableDiffusionXLModularPipeline)
    assert not isinstance(anyaccel.DiffusionPipeline.from_pretrained(tmp_path), anyaccel.ModularPipeline)


def test_a_missing_component_is_named(own_folder: Path) -> None:
    index = json.loads((own_folder / INDEX).read_text())
    index["vae"][2]["pretrained_model_name_or_path"] = str(own_folder)
    (own_folder / INDEX).write_text(json.dumps(index))
    shutil.rmtree(own_folder / "vae")
    expected = f"component vae from {own_folder / 'vae'}: this folder does not exist"
    with pytest.raises(anyaccel.AnyaccelError, match=expected) as error:
        anyaccel.ModularPipeline.from_pretrained(own_folder)
    assert isinstance(error.value, OSError)
    assert anyaccel.ModularPipeline.from_pretrained(own_folder, vae=None).vae is None


def rewrite_index(folder: Path, name: str, change: dict[str, Any] | None, **values: Any) -> None:
    """Change the options of a component in the index, and other values."""
    index = json.loads((folder / INDEX).read_text()) | values
    index[name][2] |= change or {}
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "values"),
    [
        ({"type_hint": ["os", "system"]}, {}),
        ({"unknown": 1}, {}),
        (None, {"_class_name": "StableDiffusionXLPipeline"}),
    ],
)
def test_a_faulty_index_is_named(change: Any, values: dict[str, Any], own_folder: Path) -> None:
    rewrite_index(own_folder, "unet", change, **values)
    with pytest.raises(anyaccel.AnyaccelError, match=f"cannot load {own_folder}") as error:
        anyaccel.ModularPipeline.from_pretrained(own_folder)
    assert error.value.hint == f"check its {INDEX}"


def test_weights_in_other_folders_are_checked_before_loading(own_folder: Path, tmp_path: Path, capfd: Any) -> None:
    other = Path(shutil.copytree(own_folder / "vae", tmp_path / "other" / "vae"))
    shutil.rmtree(own_folder / "vae")
    rewrite_index(own_folder, "vae", {"pretrained_model_name_or_path": str(tmp_path / "other")})
    weights = next(other.glob("*.safetensors"))
    content = weights.read_bytes()
    weights.write_bytes(content[:-100])
    with pytest.raises(anyaccel.AnyaccelError, match=f"{weights} is truncated"):
        anyaccel.ModularPipeline.from_pretrained(own_folder)
    weights.unlink()
    torch.save(safetensors.torch.load(content), weights.with_suffix(".bin"))
    with pytest.raises(anyaccel.AnyaccelError, match="pickled") as error:
        anyaccel.ModularPipeline.from_pretrained(own_folder)
    assert "use_safetensors=False" in error.value.hint
    assert "Loading pipeline components" not in capfd.readouterr().err
    assert anyaccel.ModularPipeline.from_pretrained(own_folder, names=["vae"], use_safetensors=False).vae is not None
    assert anyaccel.ModularPipeline.from_pretrained(own_folder, names=["unet"], vae=None).vae is None


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"dtpye": torch.bfloat16}, "the component text_encoder has no option 'dtpye'", "correct its name"),
        ({"workflow": "text2imag"}, "no workflow 'text2imag'", "did you mean text2image"),
        ({"names": ["guider"]}, "guider, which is not loaded", "guider=component"),
    ],
)
def test_unknown_options_are_named(options: dict[str, Any], message: str, hint: str, folder: Path) -> None:
    with pytest.raises(anyaccel.AnyaccelError, match=message) as error:
        anyaccel.ModularPipeline.from_pretrained(folder, **options)
    assert hint in error.value.hint


def test_auto_classes_reject_a_modular_folder(folder: Path) -> None:
    with pytest.raises(anyaccel.AnyaccelError, match=r"use anyaccel\.ModularPipeline"):
        anyaccel.AutoPipelineForText2Image.from_pretrained(folder)
