"""Modular pipelines with blocks of the user, added before or after placement: the image of stock diffusers."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy
import pytest
import torch

import anyaccel
from anyaccel.emulator.run_forked import run_forked
from anyaccel.recipes import recipes, run
from tests.conftest import NEEDS_RECIPES

pytestmark = [NEEDS_RECIPES, pytest.mark.filterwarnings("ignore::FutureWarning")]
LIBRARY: Any = diffusers
XL = "stable-diffusion-xl-modular"
CODE = '''
"""Blocks of a folder: those of SDXL and a block that scales the latents by a table in float64."""

import torch
from diffusers import StableDiffusionXLAutoBlocks
from diffusers.modular_pipelines import InputParam, ModularPipelineBlocks, OutputParam


class Tint(ModularPipelineBlocks):
    model_name = "stable-diffusion-xl"

    def __init__(self, start=0.5):
        super().__init__()
        self.start = start

    @property
    def inputs(self):
        return [InputParam(name="latents", required=True)]

    @property
    def intermediate_outputs(self):
        return [OutputParam(name="latents")]

    def __call__(self, components, state):
        block = self.get_block_state(state)
        device = components._execution_device
        tint = torch.linspace(self.start, 1, block.latents.shape[1], dtype=torch.float64, device=device)
        block.latents = block.latents * tint.to(block.latents.dtype)[None, :, None, None]
        self.set_block_state(state, block)
        return components, state


class TintedBlocks(StableDiffusionXLAutoBlocks):
    def __init__(self):
        super().__init__()
        self.sub_blocks.insert("tint", Tint(), len(self.sub_blocks) - 1)
'''
NAMESPACE: dict[str, Any] = {"__name__": __name__}
exec(CODE, NAMESPACE)
Tint, TintedBlocks = NAMESPACE["Tint"], NAMESPACE["TintedBlocks"]

Change = Callable[[Any], Any]


def draw(pipe: Any) -> Any:
    return run(recipes()[XL], pipe)


def make() -> Any:
    return recipes()[XL].make()


def rebuild(pipe: Any, blocks: Any) -> Any:
    """Return a pipeline of other blocks with the components of the first pipeline."""
    other = blocks.init_pipeline()
    other.update_components(**{name: getattr(pipe, name) for name in other.pretrained_component_names})
    return other


def insert_block(pipe: Any, start: float = 0.5) -> Any:
    blocks = pipe.blocks  # a copy
    blocks.sub_blocks.insert("tint", Tint(start), len(blocks.sub_blocks) - 1)
    return blocks


def insert(pipe: Any) -> Any:
    return rebuild(pipe, insert_block(pipe))


def replace(pipe: Any) -> Any:
    blocks = insert_block(pipe)
    blocks.sub_blocks["tint"] = Tint(0.2)
    return rebuild(pipe, blocks)


def remove(pipe: Any) -> Any:
    blocks = pipe.blocks
    blocks.sub_blocks.pop("ip_adapter")
    return rebuild(pipe, blocks)


def choose_workflow(pipe: Any) -> Any:
    return rebuild(pipe, insert_block(pipe).get_workflow("text2image"))


def give_other_unet(pipe: Any) -> Any:
    unet = make().unet
    with torch.no_grad():
        unet.conv_in.weight.mul_(1.5)
    pipe.update_components(unet=unet)
    return pipe


def give_other_guider(pipe: Any) -> Any:
    pipe.update_components(guider=LIBRARY.ClassifierFreeGuidance(guidance_scale=2.0))
    return pipe


@pytest.mark.parametrize("change", [insert, replace, remove, choose_workflow, give_other_unet, give_other_guider])
def test_changes_before_and_after_placement(change: Change) -> None:
    expected = draw(change(make()))

    def use(_: Any) -> Any:
        before = anyaccel.place(change(make()), "neuron", dtype="float32")
        after = anyaccel.place(make(), "neuron", dtype="float32")
        unchanged = draw(after)
        after = change(after)
        return [draw(before), draw(after)], unchanged, after.unet.device.type

    images, unchanged, device = run_forked("neuron", use)
    assert device == "neuron"
    for image in images:
        assert numpy.abs(image - expected).max() < 2e-3
    is_changed = numpy.abs(unchanged - expected).max() > 1e-3
    assert is_changed == (change is not remove), "the test must see the change"


def test_blocks_are_not_copied_by_calls() -> None:
    """A block may have an attribute that cannot be copied."""
    blocks = insert_block(make())
    blocks.sub_blocks["tint"].lock = threading.Lock()
    pipe = LIBRARY.StableDiffusionXLModularPipeline(blocks=blocks)
    pipe.update_components(**{name: getattr(make(), name) for name in pipe.pretrained_component_names})
    expected = draw(pipe)
    assert numpy.array_equal(draw(anyaccel.place(pipe, "cpu", dtype="float32")), expected)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder whose blocks are in its Python file."""
    folder = tmp_path / "model"
    make().save_pretrained(str(folder), overwrite_modular_index=True)
    (folder / "block.py").write_text(CODE)
    config = {"_class_name": "TintedBlocks", "auto_map": {"ModularPipelineBlocks": "block.TintedBlocks"}}
    (folder / "modular_config.json").write_text(json.dumps(config))
    return folder


def test_blocks_from_the_code_of_a_folder(folder: Path) -> None:
    stock = LIBRARY.ModularPipeline.from_pretrained(str(folder), trust_remote_code=True)
    stock.load_components(trust_remote_code=True)
    expected = draw(stock)

    def use(_: Any) -> Any:
        pipe = anyaccel.DiffusionPipeline.from_pretrained(folder, trust_remote_code=True, device="mps", dtype="float32")
        assert "tint" in pipe.blocks.sub_blocks
        return draw(pipe)

    assert numpy.abs(run_forked("mps", use) - expected).max() < 2e-3
    assert numpy.abs(draw(make()) - expected).max() > 1e-3


def test_a_config_without_code(folder: Path) -> None:
    (folder / "modular_config.json").write_text(json.dumps({"auto_map": ["block.TintedBlocks"]}))
    with pytest.raises(anyaccel.AnyaccelError, match="does not appear to have any custom code"):
        anyaccel.ModularPipeline.from_pretrained(folder, trust_remote_code=True)


def test_code_of_a_folder_runs_once(folder: Path) -> None:
    runs = folder / "runs.txt"
    code = f"with open({str(runs)!r}, 'a') as file:\n    file.write('x')\n"
    (folder / "block.py").write_text(CODE + code)
    anyaccel.ModularPipeline.from_pretrained(folder, trust_remote_code=True)
    assert runs.read_text() == "x"


def test_code_of_a_folder_is_not_run(folder: Path) -> None:
    (folder / "block.py").write_text("raise SystemExit('this must never run')\n")
    for kind in (anyaccel.DiffusionPipeline, anyaccel.ModularPipeline):
        with pytest.raises(anyaccel.AnyaccelError, match="contains custom code") as caught:
            kind.from_pretrained(folder)
        assert "trust_remote_code=True" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"block\.py.* does not exist"),
        ("def f(:\n", r"block\.py: SyntaxError: invalid syntax \(block\.py, line 1\)"),
        ("x = 1\n", r"block\.py: .*TintedBlocks"),
        ("import nothing_like_this\n", r"block\.py: .*nothing_like_this"),
        (
            CODE.replace("self.sub_blocks", "raise TypeError('boom')\n        self.sub_blocks", 1),
            r"TypeError: boom \(block\.py, line",
        ),
    ],
)
def test_faulty_code_of_a_folder_is_named(text: str | None, message: str, folder: Path) -> None:
    (folder / "block.py").unlink()
    if text is not None:
        (folder / "block.py").write_text(text)
    with pytest.raises(anyaccel.AnyaccelError, match=message) as caught:
        anyaccel.ModularPipeline.from_pretrained(folder, trust_remote_code=True)
    assert caught.value.hint
