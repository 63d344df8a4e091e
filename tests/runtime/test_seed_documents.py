"""The code of the three documents that this project began with, run on the virtual devices.

Diffusers' pages on Gaudi and on MPS and its pull request for Neuron are quoted as they stand, less the spaces at the
ends of lines. Two things differ when a block is run: the import, and a tiny model of this machine in place of the hub's.
"""

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy
import numpy.typing
import pytest
import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel

import anyaccel
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.process import run_forked
from anyaccel.recipes import recipes
from anyaccel.recipes.flux import transformer_shape
from tests.conftest import NEEDS_RECIPES

pytestmark = [
    NEEDS_RECIPES,
    # The documents write torch_dtype, which diffusers has since renamed.
    pytest.mark.filterwarnings("ignore:`torch_dtype` is deprecated:FutureWarning"),
    # Importing diffusers' automatic pipelines imports a module that uses it.
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
    # A CPU without bfloat16 says so once.
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning"),
]

Picture = numpy.typing.NDArray[numpy.float32]
Block = dict[str, Any]

GAUDI = """
import torch
from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("black-forest-labs/FLUX.1-schnell", torch_dtype=torch.bfloat16)
pipeline.to("hpu")

image = pipeline("An image of a squirrel in Picasso style").images[0]
"""

MPS = """
from diffusers import DiffusionPipeline

pipe = DiffusionPipeline.from_pretrained("stable-diffusion-v1-5/stable-diffusion-v1-5")
pipe = pipe.to("mps")

# Recommended if your computer has < 64 GB of RAM
pipe.enable_attention_slicing()

prompt = "a photo of an astronaut riding a horse on mars"
image = pipe(prompt).images[0]
image
"""

PRIMING = """
  from diffusers import DiffusionPipeline

  pipe = DiffusionPipeline.from_pretrained("stable-diffusion-v1-5/stable-diffusion-v1-5").to("mps")
  pipe.enable_attention_slicing()

  prompt = "a photo of an astronaut riding a horse on mars"
  # First-time "warmup" pass if PyTorch version is 1.13
+ _ = pipe(prompt, num_inference_steps=1)

  # Results match those from the CPU device after the warmup pass.
  image = pipe(prompt).images[0]
"""

SLICING = """
from diffusers import DiffusionPipeline
import torch

pipeline = DiffusionPipeline.from_pretrained("stable-diffusion-v1-5/stable-diffusion-v1-5", torch_dtype=torch.float16, variant="fp16", use_safetensors=True).to("mps")
pipeline.enable_attention_slicing()
"""  # noqa: E501

NEURON = """
import torch
import torch_neuronx  # noqa: F401 — registers torch.neuron

from diffusers import AutoPipelineForText2Image

# Load and move to Neuron device
pipe = AutoPipelineForText2Image.from_pretrained(
    "stabilityai/sdxl-turbo",
    torch_dtype=torch.bfloat16,
    variant="fp16",
)
pipe = pipe.to(torch.neuron.current_device())

# Warmup
pipe(prompt="warmup", height=512, width=512, num_inference_steps=1, guidance_scale=0.0)

# Inference
image = pipe(
    prompt="a golden retriever surfing a wave, photorealistic",
    height=512,
    width=512,
    num_inference_steps=1,
    guidance_scale=0.0,
).images[0]

image.save("output.png")
"""

WITH_THE_LINE_ADDED = "\n".join(line[2:] for line in PRIMING.splitlines())
BLOCKS = {
    "gaudi": ("hpu", GAUDI),
    "mps": ("mps", MPS),
    "priming": ("mps", WITH_THE_LINE_ADDED),
    "neuron": ("neuron", NEURON),
}

MOVES = ('pipeline.to("hpu")', 'pipe = pipe.to("mps")', '.to("mps")', "pipe = pipe.to(torch.neuron.current_device())")
"""What the documents write to reach the device."""

ONE_LEVEL = 1 / 255
"""Pictures have 256 levels: in float32 two of them differ by rounding alone."""
HALF_PRECISION = 5e-2
"""What the pull request allows between two pictures in bfloat16."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Tiny models under the names of the hub: those of the recipes, with a size that a CPU draws in seconds."""
    folder = tmp_path_factory.mktemp("models")
    for name, make in MODELS.items():
        make(folder / name)
    return {name: str(folder / name) for name in MODELS}


def save_flux(folder: Path) -> None:
    """Flux, whose text has 512 tokens: one narrow head, since a CPU may have no bfloat16 of its own."""
    shape = transformer_shape(num_attention_heads=1, attention_head_dim=8, axes_dims_rope=(2, 2, 4))
    pipe: Any = recipes()["flux"].make()
    pipe.transformer = FluxTransformer2DModel(**shape | {"guidance_embeds": False})
    pipe.save_pretrained(folder)


def save_stable_diffusion(folder: Path) -> None:
    """With float16 and float32 files side by side, as the hub has it."""
    pipe: Any = recipes()["stable-diffusion"].make()
    halve(pipe)
    pipe.save_pretrained(folder, variant="fp16")
    recipes()["stable-diffusion"].make().save_pretrained(folder)


def save_turbo(folder: Path) -> None:
    """SDXL whose autoencoder shrinks 32 times, so that 512 pixels are 16 by 16 for the denoiser."""
    parts: Any = recipes()["stable-diffusion-xl"].make().components
    depth = 6
    torch.manual_seed(20)
    parts["vae"] = AutoencoderKL(
        block_out_channels=(2,) * depth,
        norm_num_groups=1,
        down_block_types=("DownEncoderBlock2D",) * depth,
        up_block_types=("UpDecoderBlock2D",) * depth,
        mid_block_add_attention=False,
    )
    pipe: Any = diffusers.StableDiffusionXLPipeline(**parts)
    halve(pipe)
    pipe.save_pretrained(folder, variant="fp16")


def halve(pipe: Any) -> None:
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            torch.nn.Module.half(part)


MODELS: dict[str, Callable[[Path], None]] = {
    "black-forest-labs/FLUX.1-schnell": save_flux,
    "stable-diffusion-v1-5/stable-diffusion-v1-5": save_stable_diffusion,
    "stabilityai/sdxl-turbo": save_turbo,
}


def adapt(block: str, models: dict[str, str], *more: tuple[str, str]) -> str:
    """A document's block with another import and another model, and nothing else unless it is named."""
    for before, after in [("from diffusers import", "from anyaccel import"), *models.items(), *more]:
        block = block.replace(before, after)
    return block


def on_the_cpu(block: str, models: dict[str, str]) -> str:
    """The same block for plain diffusers in float32 where every machine can run it."""
    for move in MOVES:
        block = block.replace(move, "")
    block = block.replace("import torch_neuronx  # noqa: F401 — registers torch.neuron", "")
    return adapt(block.replace("torch.bfloat16", "torch.float32"), {**models, "from anyaccel import": "from diffusers import"})


def execute(block: str, folder: Path) -> Block:
    """Run a block in a folder of its own, from one state of the random numbers."""
    before = os.getcwd()
    os.chdir(folder)
    # Flux is asked for no size, and would draw 1024 by 1024 pixels: the class says so, not the model.
    flux: Any = diffusers.FluxPipeline
    flux.default_sample_size = property(lambda pipe: 8, lambda pipe, size: None)
    names: Block = {}
    torch.manual_seed(7)
    try:
        exec(compile(block, "document", "exec"), names)
    finally:
        del flux.default_sample_size
        os.chdir(before)
    return names


def read_picture(names: Block) -> Picture:
    return numpy.asarray(names["image"], dtype=numpy.float32) / 255


def draw(block: str, device: str, folder: Path) -> tuple[Picture, str, str]:
    """The picture of a block on a virtual device, and the plan's device and type."""

    def use(accelerator: VirtualAccelerator) -> tuple[Picture, str, str]:
        names = execute(block, folder)
        pipe = names.get("pipe", names.get("pipeline"))
        assert isinstance(pipe, diffusers.DiffusionPipeline)
        plan: anyaccel.Plan = pipe.plan  # type: ignore[attr-defined]
        assert plan.virtual
        assert not accelerator.ledger.rows("error")
        return read_picture(names), plan.device, plan.dtype.value

    return run_forked(device, use, strict=True)


@pytest.fixture(scope="module")
def expected(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Picture]:
    """What plain diffusers draws on the CPU in float32."""
    folder = tmp_path_factory.mktemp("cpu")
    return {name: read_picture(execute(on_the_cpu(block, models), folder)) for name, (_, block) in BLOCKS.items()}


@pytest.mark.parametrize(("name", "dtype"), [("gaudi", "bfloat16"), ("mps", "float16"), ("neuron", "bfloat16")])
def test_the_code_of_a_document_runs(
    name: str, dtype: str, models: dict[str, str], expected: dict[str, Picture], tmp_path: Path
) -> None:
    device, block = BLOCKS[name]
    picture, place, chosen = draw(adapt(block, models), device, tmp_path)
    assert (place, chosen) == (f"{device}:0", dtype)
    assert picture.std() > 0.02, "a picture of one colour, such as a black one"
    assert abs(picture - expected[name]).mean() < HALF_PRECISION
    assert (tmp_path / "output.png").exists() == (name == "neuron")


@pytest.mark.parametrize("name", BLOCKS)
def test_in_float32_the_code_of_a_document_gives_the_picture_of_the_cpu(
    name: str, models: dict[str, str], expected: dict[str, Picture], tmp_path: Path
) -> None:
    """The type is the third thing that differs here: MPS draws in float16 unless it is told otherwise."""
    device, block = BLOCKS[name]
    types = [("torch.bfloat16", "torch.float32"), ('.to("mps")', '.to("mps", dtype="float32")')]
    picture, _, chosen = draw(adapt(block, models, *types), device, tmp_path)
    assert chosen == "float32"
    assert picture.std() > 0.02
    assert abs(picture - expected[name]).max() < 1.5 * ONE_LEVEL
