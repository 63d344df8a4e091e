"""Warmup of modular pipelines: the blocks of text-to-image run, and the next call compiles nothing more."""

from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image

import anyaccel
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.recipes import recipes
from anyaccel.upstream.modular_blocks import list_blocks
from tests.conftest import NEEDS_RECIPES

pytestmark = [NEEDS_RECIPES, pytest.mark.filterwarnings("ignore::FutureWarning")]
XL = "stable-diffusion-xl-modular"


def save(name: str, folder: Path) -> Path:
    pipe: Any = recipes()[name].make()
    pipe.save_pretrained(str(folder), overwrite_modular_index=True)
    return folder


def make_call(name: str, height: int, width: int) -> dict[str, Any]:
    texts = {key: value for key, value in recipes()[name].call().items() if key == "max_sequence_length"}
    return {"height": height, "width": width, **texts}


def record_shapes(pipe: Any, name: str) -> list[Any]:
    """Return a list to which each call of the denoiser appends the shape of its input."""
    shapes: list[Any] = []

    def append(model: Any, args: Any, kwargs: Any) -> None:
        latents = args[0] if args else next(iter(kwargs.values()))
        shapes.append([tuple(item.shape) for item in latents] if isinstance(latents, list) else tuple(latents.shape))

    getattr(pipe, name).register_forward_pre_hook(append, with_kwargs=True)
    return shapes


def forbid_encoding(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        pytest.fail("text-to-image does not encode an image")

    monkeypatch.setattr(pipe.vae, "encode", fail)


@pytest.mark.parametrize(
    ("name", "denoiser"), [(XL, "unet"), ("flux-modular", "transformer"), ("z-image-modular", "transformer")]
)
def test_warmup_runs_text_to_image(name: str, denoiser: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = anyaccel.DiffusionPipeline.from_pretrained(save(name, tmp_path)).to("cpu")
    call = make_call(name, 16, 32)
    forbid_encoding(pipe, monkeypatch)
    shapes = record_shapes(pipe, denoiser)
    pipe.warmup([call])
    warmed = list(shapes)
    shapes.clear()
    pipe(prompt="a fox", num_inference_steps=2, **call)
    assert warmed
    assert all(shape in warmed for shape in shapes)


def test_with_an_image_image_to_image_is_warmed() -> None:
    pipe = anyaccel.place(recipes()[XL].make(), "cpu")
    shapes, encoded = record_shapes(pipe, "unet"), []
    pipe.vae.encoder.register_forward_hook(lambda *_: encoded.append(True))
    pipe.warmup(image=Image.new("RGB", (64, 64)))
    assert shapes
    assert encoded


def test_required_images_are_replaced_by_placeholders() -> None:
    pipe = anyaccel.place(recipes()["qwen-image-edit-modular"].make(), "cpu")
    shapes = record_shapes(pipe, "transformer")
    pipe.warmup()
    assert shapes


def test_progress_bars_and_random_state_are_restored(capsys: Any) -> None:
    pipe = anyaccel.place(recipes()[XL].make(), "cpu")
    blocks = [block for block in list_blocks(pipe) if hasattr(block, "progress_bar")]
    for index, block in enumerate(blocks):
        block._progress_bar_config = {"disable": True, "desc": str(index)}
    call: dict[str, Any] = {"prompt": "a fox", "height": 16, "width": 16, "num_inference_steps": 2, "seed": 7}
    expected = numpy.asarray(pipe(**call, output="images")[0])
    pipe.warmup([(16, 16)])
    assert [block._progress_bar_config["desc"] for block in blocks] == [str(index) for index in range(len(blocks))]
    assert numpy.array_equal(numpy.asarray(pipe(**call, output="images")[0]), expected)
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("pipelines_imported", "compiler_imported")
@pytest.mark.parametrize("name", [pytest.param(XL, marks=pytest.mark.slow), "flux-modular"])
@pytest.mark.long
def test_the_next_call_compiles_nothing(name: str, tmp_path: Path) -> None:
    folder = save(name, tmp_path)

    def use(accelerator: VirtualAccelerator) -> tuple[int, int]:
        pipe = anyaccel.DiffusionPipeline.from_pretrained(folder)
        pipe.to("neuron", compile=True, dtype="fp32")
        call = make_call(name, 16, 16)
        pipe.warmup([call])
        before = len(accelerator.compiler.graphs)
        pipe(prompt="a fox", num_inference_steps=2, seed=1, **call)
        return before, len(accelerator.compiler.graphs)

    before, after = run_forked("neuron", use)
    assert before >= 1
    assert after == before
