"""`generate` with the folder of a modular pipeline: the image of stock diffusers, the metadata and clear errors."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import numpy
import pytest
import torch

from anyaccel.cli.main import main
from anyaccel.emulator.run_forked import run_forked
from anyaccel.errors import ModelError, UsageError
from anyaccel.generation.generate import generate
from anyaccel.generation.media import generate_one
from anyaccel.generation.model_loading import load_model, release_model
from anyaccel.generation.model_name import digest_folder
from anyaccel.generation.request import make_request
from anyaccel.progress import ProgressListener
from anyaccel.recipes import recipes
from anyaccel.runtime.call_parameters import find_missing_arguments
from tests.conftest import NEEDS_RECIPES

pytestmark = [NEEDS_RECIPES, pytest.mark.filterwarnings("ignore::FutureWarning")]
LIBRARY: Any = diffusers
XL = "stable-diffusion-xl-modular"
INDEX = "modular_model_index.json"
CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32", "seed": 7}
# Arguments of the recipes that a text-to-image call requires for a tiny model.
NEEDED = ("width", "height", "max_sequence_length", "text_encoder_out_layers")


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


@pytest.fixture(scope="module", autouse=True)
def _release() -> Iterator[None]:
    yield
    release_model()


def call_of(name: str, **more: Any) -> dict[str, Any]:
    call = {key: value for key, value in recipes()[name].call().items() if key in NEEDED}
    return {**call, "num_inference_steps": 2, **more}


def draw_with_stock(folder: Path, seed: int = 7, guidance: float | None = None, **call: Any) -> Any:
    pipe = LIBRARY.ModularPipeline.from_pretrained(str(folder))
    pipe.load_components()
    if guidance is not None:
        pipe.update_components(guider=pipe.guider.new(guidance_scale=guidance))
    generator = torch.Generator("cpu").manual_seed(seed)
    return numpy.asarray(pipe(prompt="a red fox", generator=generator, output="images", **call)[0])


@pytest.mark.parametrize(
    "name",
    [
        "flux-modular",
        "qwen-image-modular",
        "stable-diffusion-3-modular",
        "z-image-modular",
        "ernie-image-modular",
        "flux-2-klein-modular",
        "flux-kontext-modular",
    ],
)
def test_same_image_as_stock_diffusers(name: str, tmp_path: Path) -> None:
    folder, call = save(name, tmp_path), call_of(name)
    image = generate("a red fox", folder, **CPU, **call)[0]
    assert numpy.array_equal(numpy.asarray(image), draw_with_stock(folder, **call))


def test_options_and_metadata(folder: Path) -> None:
    call = call_of(XL, negative_prompt="blue")
    result = generate("a red fox", folder, num_images_per_prompt=2, **CPU, **call)
    assert result.seeds == (7, 8)
    for image, seed in zip(result, result.seeds, strict=True):
        assert numpy.array_equal(numpy.asarray(image), draw_with_stock(folder, seed, **call))
    metadata = result.metadata[0]
    assert (metadata.pipeline, metadata.scheduler) == ("StableDiffusionXLModularPipeline", "EulerDiscreteScheduler")
    assert (metadata.steps, metadata.negative_prompt, metadata.guidance) == (2, "blue", 7.5)
    again = generate(**metadata.arguments())
    assert again[0].tobytes() == result[0].tobytes()


@pytest.mark.parametrize("device", ["mps", "neuron"])
def test_virtual_devices(folder: Path, device: str) -> None:
    call = call_of(XL)
    expected = draw_with_stock(folder, **call).astype(float)

    def use(_: Any) -> Any:
        return numpy.asarray(generate("a red fox", folder, **{**CPU, "device": device}, **call)[0]).astype(float)

    assert numpy.abs(run_forked(device, use) - expected).max() <= 1


@pytest.mark.parametrize("name", [XL, "qwen-image-modular"])
def test_guidance_of_the_guider(name: str, folder: Path, tmp_path: Path) -> None:
    model, call = folder if name == XL else save(name, tmp_path), call_of(name)
    for scale in (3.0, 1.0):
        result = generate("a red fox", model, guidance_scale=scale, **CPU, **call)
        expected = draw_with_stock(model, guidance=scale, **call)
        assert numpy.array_equal(numpy.asarray(result[0]), expected)
        assert result.metadata[0].guidance == scale
        again = generate(**result.metadata[0].arguments())
        assert again[0].tobytes() == result[0].tobytes()
    default = generate("a red fox", model, **CPU, **call)[0]
    assert numpy.array_equal(numpy.asarray(default), draw_with_stock(model, **call))
    assert not numpy.array_equal(numpy.asarray(default), expected)


def test_guider_is_restored_after_an_error(folder: Path) -> None:
    request = make_request("a red fox", folder, "cpu", 7, dtype="float32", **call_of(XL, guidance_scale=3.0))
    loaded = load_model(request)
    guider, index = loaded.pipe.guider, dict(loaded.pipe.config)

    class FailingListener(ProgressListener):
        def on_step(self, done: int, total: int | None) -> None:
            assert loaded.pipe.guider.guidance_scale == 3.0
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate_one(loaded, "a red fox", 7, request.call, FailingListener())
    assert loaded.pipe.guider is guider
    assert dict(loaded.pipe.config) == index


def run_command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """Run `anyaccel generate` in this process."""
    monkeypatch.setattr(sys, "argv", ["anyaccel", "generate", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert not caught.value.code


def test_command_line(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    release_model()
    first, again = str(tmp_path / "fox.png"), str(tmp_path / "again.png")
    options = ["--device", "cpu", "--seed", "7", "--steps", "2", "--size", "16x16", "--guidance", "3"]
    run_command(monkeypatch, "a red fox", "--model", str(folder), *options, "-o", first)
    output, messages = capfd.readouterr()
    assert output == f"{first}  seed 7\n"
    # Without the warnings and progress bars of diffusers and transformers.
    assert messages == f"{folder} on cpu:0 in float32\n"
    run_command(monkeypatch, "--from", first, "-o", again)
    assert "warning" not in capfd.readouterr().err
    assert Path(again).read_bytes() == Path(first).read_bytes()


class RecordingListener(ProgressListener):
    def __init__(self) -> None:
        self.components: list[str] = []
        self.steps: list[tuple[int, int | None]] = []

    def on_component(self, done: int, total: int, name: str) -> None:
        self.components.append(name)

    def on_step(self, done: int, total: int | None) -> None:
        self.steps.append((done, total))


def test_listener_receives_components_and_steps(folder: Path, capsys: Any) -> None:
    release_model()
    request = make_request("a red fox", folder, "cpu", 7, dtype="float32", **call_of(XL))
    listener = RecordingListener()
    loaded = load_model(request, listener)
    generate_one(loaded, "a red fox", 7, request.call, listener)
    assert {"unet", "vae", "text_encoder", "tokenizer", "scheduler", ""} <= set(listener.components)
    assert listener.steps[0] == (0, 2)
    assert listener.steps[-1] == (2, 2)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("name", "call", "message"),
    [
        ("flux-2-klein-modular", {"guidance_scale": 3.0}, "does not accept the argument guidance_scale"),
        (XL, {"numb_inference_steps": 3}, "does not accept the argument numb_inference_steps"),
        ("ltx-modular", {"seconds": 1, "frames": 9}, "cannot be combined"),
        ("minimax-music-3", {}, r"requires lyrics in addition to a prompt\nhint: add --set lyrics="),
    ],
)
def test_unsuitable_calls_are_rejected(
    name: str, call: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    model = folder if name == XL else save(name, tmp_path)
    with pytest.raises(UsageError, match=message):
        generate("a red fox", model, **CPU, **call)


@pytest.mark.parametrize(
    ("name", "missing"),
    [(XL, []), ("qwen-image-edit-modular", ["image"]), ("qwen-image-modular", []), ("minimax-music-3", ["lyrics"])],
)
def test_required_inputs(name: str, missing: list[str]) -> None:
    """Values that a block computes from an input are not required."""
    pipe = recipes()[name].make()
    assert find_missing_arguments(pipe, {"prompt": "a red fox"}) == missing
    passed = {"prompt": "a red fox", **dict.fromkeys(missing, 1)}
    assert find_missing_arguments(pipe, passed) == []


def test_a_changed_folder_is_loaded_again(own_folder: Path, tmp_path: Path) -> None:
    """The digest covers the components in other folders, but not the paths in the index."""
    before = digest_folder(own_folder)
    assert digest_folder(Path(shutil.copytree(own_folder, tmp_path / "copy"))) == before
    index = json.loads((own_folder / INDEX).read_text())
    shutil.move(own_folder / "unet", tmp_path / "unet")
    index["unet"][2] |= {"pretrained_model_name_or_path": str(tmp_path), "subfolder": "unet"}
    (own_folder / INDEX).write_text(json.dumps(index))
    assert digest_folder(own_folder) == before
    config = tmp_path / "unet" / "config.json"
    config.write_text(config.read_text() + "\n")
    assert digest_folder(own_folder) != before


def test_damaged_folders(own_folder: Path, tmp_path: Path) -> None:
    weights = next((own_folder / "unet").glob("*.safetensors"))
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelError, match="unet"):
        generate("a red fox", own_folder, **CPU)
    weights.write_bytes(content)
    blocks = own_folder / "modular_config.json"
    blocks.write_text(json.dumps({"auto_map": {"ModularPipelineBlocks": "block.Own"}}))
    with pytest.raises(ModelError, match="contains custom code"):
        generate("a red fox", own_folder, **CPU)
    blocks.unlink()
    (own_folder / INDEX).write_text("{")
    with pytest.raises(ModelError, match=INDEX):
        generate("a red fox", own_folder, **CPU)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"no model_index\.json"):
        generate("a red fox", tmp_path / "empty", **CPU)
