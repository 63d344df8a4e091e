"""The code blocks of the three documents that this project is based on, run on virtual devices.

Diffusers' pages about Gaudi and MPS and its pull request for Neuron are quoted verbatim, without trailing spaces. A
block is run with two changes: the import, and a tiny local model instead of the one from the Hub.
"""

import copy
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

import anyaccel
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.recipes import recipes
from anyaccel.recipes.families.flux import transformer_shape
from tests.conftest import NEEDS_RECIPES
from tests.runtime.placement.test_row_split import record_rows

pytestmark = [
    NEEDS_RECIPES,
    # The documents use torch_dtype, which diffusers has since renamed.
    pytest.mark.filterwarnings("ignore:`torch_dtype` is deprecated:FutureWarning"),
    # Importing diffusers' AutoPipeline classes imports a module that uses it.
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"),
    # torch warns once on a CPU without bfloat16.
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning"),
]

GeneratedMedia = numpy.typing.NDArray[numpy.float32]
Block = dict[str, Any]
library: Any = diffusers
"""diffusers as `Any`, because its classes have no annotations."""

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

PRIMING_CODE = "\n".join(line[2:] for line in PRIMING.splitlines())
BLOCKS = {
    "gaudi": ("hpu", GAUDI),
    "mps": ("mps", MPS),
    "priming": ("mps", PRIMING_CODE),
    "neuron": ("neuron", NEURON),
}

MOVES = ('pipeline.to("hpu")', 'pipe = pipe.to("mps")', '.to("mps")', "pipe = pipe.to(torch.neuron.current_device())")
"""The lines of the documents that move a pipeline to the device."""

ONE_LEVEL = 1 / 255
"""One of 256 gray levels: two images in float32 differ only by rounding."""
HALF_PRECISION = 5e-2
"""The tolerance that the pull request uses for bfloat16 images."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return paths of tiny models by Hub ID, small enough to run on a CPU in seconds."""
    folder = tmp_path_factory.mktemp("models")
    for name, make in MODELS.items():
        make(folder / name)
    return {name: str(folder / name) for name in MODELS}


def save_flux(folder: Path) -> None:
    """Save Flux with one narrow head, because 512 text tokens are slow on CPUs without bfloat16."""
    shape = transformer_shape(num_attention_heads=1, attention_head_dim=8, axes_dims_rope=(2, 2, 4))
    pipe: Any = recipes()["flux"].make()
    pipe.transformer = library.FluxTransformer2DModel(**shape | {"guidance_embeds": False})
    pipe.save_pretrained(folder)


def save_stable_diffusion(folder: Path) -> None:
    """Save Stable Diffusion with float16 and float32 files, as on the Hub."""
    pipe: Any = recipes()["stable-diffusion"].make()
    pipe.unet = shrink(pipe.unet)
    half = copy.deepcopy(pipe)
    halve(half)
    half.save_pretrained(folder, variant="fp16")
    pipe.save_pretrained(folder)


def save_turbo(folder: Path) -> None:
    """Save SDXL with a VAE that scales by 32, so 512 by 512 pixels are 16 by 16 latents."""
    base: Any = recipes()["stable-diffusion-xl"].make()
    depth = 6
    torch.manual_seed(20)
    vae = library.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * depth,
        up_block_types=("UpDecoderBlock2D",) * depth,
        block_out_channels=(2,) * depth,
        norm_num_groups=1,
        mid_block_add_attention=False,
    )
    pipe = library.StableDiffusionXLPipeline(**base.components | {"unet": shrink(base.unet), "vae": vae})
    halve(pipe)
    pipe.save_pretrained(folder, variant="fp16")


def shrink(unet: Any) -> Any:
    """Return a UNet with the same config except for one block, one attention layer and no mid block."""
    smaller = {
        "down_block_types": ("CrossAttnDownBlock2D",),
        "up_block_types": ("UpBlock2D",),
        "mid_block_type": None,
        "block_out_channels": (8,),
        "transformer_layers_per_block": 1,
        "attention_head_dim": 2,
    }
    torch.manual_seed(20)
    return library.UNet2DConditionModel.from_config({**unet.config, **smaller}).eval()


def halve(pipe: Any) -> None:
    for component in pipe.components.values():
        if isinstance(component, torch.nn.Module):
            torch.nn.Module.half(component)


MODELS: dict[str, Callable[[Path], None]] = {
    "black-forest-labs/FLUX.1-schnell": save_flux,
    "stable-diffusion-v1-5/stable-diffusion-v1-5": save_stable_diffusion,
    "stabilityai/sdxl-turbo": save_turbo,
}


def adapt(block: str, models: dict[str, str], *more: tuple[str, str]) -> str:
    """Replace the import, the models and `more` in a block."""
    for before, after in [("from diffusers import", "from anyaccel import"), *models.items(), *more]:
        block = block.replace(before, after)
    return block


def adapt_for_cpu(block: str, models: dict[str, str]) -> str:
    """Return a block for plain diffusers on the CPU in float32."""
    for move in MOVES:
        block = block.replace(move, "")
    block = block.replace("import torch_neuronx  # noqa: F401 — registers torch.neuron", "")
    block = block.replace("torch.bfloat16", "torch.float32")
    return adapt(
        block.replace("torch.bfloat16", "torch.float32"), {**models, "from anyaccel import": "from diffusers import"}
    )


def execute(block: str, folder: Path) -> Block:
    """Run a block in a folder with a fixed random state; return its variables."""
    before = os.getcwd()
    os.chdir(folder)
    # The block passes no size, and FluxPipeline's default is 1024 by 1024, set by the class and not by the model.
    flux = library.FluxPipeline
    flux.default_sample_size = property(lambda pipe: 8, lambda pipe, size: None)
    names: Block = {}
    torch.manual_seed(7)
    try:
        exec(compile(block, "document", "exec"), names)
    finally:
        del flux.default_sample_size
        os.chdir(before)
    return names


def read_image(names: Block) -> GeneratedMedia:
    return numpy.asarray(names["image"], dtype=numpy.float32) / numpy.float32(255)


def run_block(block: str, device: str, folder: Path) -> tuple[GeneratedMedia, str, str]:
    """Run a block on a virtual device; return the image and the plan's device and dtype."""

    def use(accelerator: VirtualAccelerator) -> tuple[GeneratedMedia, str, str]:
        names = execute(block, folder)
        pipe: Any = names.get("pipe", names.get("pipeline"))
        assert isinstance(pipe, library.DiffusionPipeline)
        plan: anyaccel.Plan = pipe.plan
        assert plan.virtual
        assert isinstance(pipe._execution_device, torch.device)
        assert not accelerator.ledger.rows("error")
        return read_image(names), plan.device, plan.dtype.value

    return run_forked(device, use, strict=True)


@pytest.fixture(scope="module")
def expected(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, GeneratedMedia]:
    """Return the images of plain diffusers on the CPU in float32."""
    folder = tmp_path_factory.mktemp("cpu")
    return {name: read_image(execute(adapt_for_cpu(block, models), folder)) for name, (_, block) in BLOCKS.items()}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("gaudi", "bfloat16"),
        ("mps", "float16"),
        pytest.param("priming", "float16", marks=pytest.mark.slow),  # the same code as "mps" after one more call
        ("neuron", "bfloat16"),
    ],
)
def test_the_code_of_a_document_runs(
    name: str, dtype: str, models: dict[str, str], expected: dict[str, GeneratedMedia], tmp_path: Path
) -> None:
    device, block = BLOCKS[name]
    image, planned_device, planned_dtype = run_block(adapt(block, models), device, tmp_path)
    assert (planned_device, planned_dtype) == (f"{device}:0", dtype)
    assert image.std() > 0.02, "the image is a single color, for example black"
    assert abs(image - expected[name]).mean() < HALF_PRECISION
    assert (tmp_path / "output.png").exists() == (name == "neuron")


@pytest.mark.parametrize("name", ["gaudi", "mps", "neuron"])
def test_in_float32_the_code_of_a_document_gives_the_image_of_the_cpu(
    name: str, models: dict[str, str], expected: dict[str, GeneratedMedia], tmp_path: Path
) -> None:
    """The dtype is replaced too: the default on MPS is float16."""
    device, block = BLOCKS[name]
    dtypes = [("torch.bfloat16", "torch.float32"), ('.to("mps")', '.to("mps", dtype="float32")')]
    image, _, planned_dtype = run_block(adapt(block, models, *dtypes), device, tmp_path)
    assert planned_dtype == "float32"
    assert image.std() > 0.02
    assert abs(image - expected[name]).max() < 1.5 * ONE_LEVEL


def test_the_half_precision_code_loads_float16_files_and_slices_attention(
    models: dict[str, str], tmp_path: Path
) -> None:
    """The block of the MPS page does not generate an image, so one step is added."""

    def use(accelerator: VirtualAccelerator) -> tuple[str, str, float]:
        pipeline = execute(adapt(SLICING, models), tmp_path)["pipeline"]
        images = pipeline("a photo", num_inference_steps=1, output_type="np").images
        return str(pipeline.unet.dtype), str(pipeline.plan.attention), float(images.std())

    dtype, attention, spread = run_forked("mps", use)
    assert dtype == "torch.float16"
    assert "sliced, half of the heads at a time" in attention
    assert spread > 0.02


SMALL = {"height": 64, "width": 64, "num_inference_steps": 1, "guidance_scale": 0.0}
LARGE = SMALL | {"height": 128}


def load_turbo(models: dict[str, str]) -> Any:
    """Load the model of the pull request to Neuron, in float32, which is faster on a CPU."""
    folder = models["stabilityai/sdxl-turbo"]
    pipe = anyaccel.AutoPipelineForText2Image.from_pretrained(folder, dtype="float32", variant="fp16")
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(torch.neuron.current_device())  # type: ignore[attr-defined]


def test_neuron_compile_has_the_signature_of_the_pull_request() -> None:
    pipe: Any = anyaccel.DiffusionPipeline
    parameters = inspect.signature(pipe.enable_neuron_compile).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items() if name != "self"}
    assert defaults == {"model_names": None, "cache_dir": None, "fullgraph": True}
    kinds = [parameter.kind for parameter in inspect.signature(pipe.neuron_warmup).parameters.values()]
    assert kinds[1:] == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]


# tests/runtime/speed/test_compile.py shows the same with a smaller pipeline, in several tests.
@pytest.mark.slow
@pytest.mark.usefixtures("compiler_imported")
def test_neuron_warmup_compiles_a_size_once_and_a_second_process_reuses_it(
    models: dict[str, str], tmp_path: Path
) -> None:
    """The denoiser is one graph; the random state and the environment are restored."""

    def use(calls: list[dict[str, Any]]) -> Callable[[VirtualAccelerator], dict[str, Any]]:
        def warm(accelerator: VirtualAccelerator) -> dict[str, Any]:
            os.environ["TORCH_NEURONX_NEFF_CACHE_DIR"] = "before"
            pipe = load_turbo(models)
            environment, state = dict(os.environ), torch.get_rng_state()
            pipe.enable_neuron_compile(cache_dir=tmp_path)
            counts = []
            for call in calls:
                pipe.neuron_warmup("warmup", **call)
                counts.append(accelerator.compiler.compiled)
            restored = torch.equal(state, torch.get_rng_state()) and dict(os.environ) == environment
            pipe("a golden retriever", **calls[-1])
            counts.append(accelerator.compiler.compiled)
            compiler = accelerator.compiler
            return {
                "compiled": counts,
                "graphs": len(compiler.graphs),
                "breaks": compiler.breaks,
                "restored": restored,
            }

        return warm

    first = run_forked("neuron", use([SMALL, LARGE, SMALL, LARGE]))
    assert first == {"compiled": [1, 2, 2, 2, 2], "graphs": 2, "breaks": [], "restored": True}
    assert len(list(tmp_path.glob("*.json"))) == 2
    second = run_forked("neuron", use([LARGE]))
    assert second == {"compiled": [0, 0], "graphs": 1, "breaks": [], "restored": True}


def test_a_timestep_is_converted_to_a_supported_dtype() -> None:
    """For tensors and Python numbers, as requested in the review of the pull request."""
    timesteps = [5, 5.0, torch.tensor(5), torch.tensor([5]), torch.tensor(5.0, dtype=torch.float64)]

    def use(accelerator: VirtualAccelerator) -> list[tuple[str, str, float]]:
        pipe = anyaccel.place(recipes()["stable-diffusion"].make(), "neuron", dtype="float32")
        inputs: list[torch.Tensor] = []
        pipe.unet.time_proj.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
        plain: Any = recipes()["stable-diffusion"].make()
        sample, text = torch.ones(1, 4, 8, 8), torch.ones(1, 7, plain.unet.config.cross_attention_dim)
        rows = []
        for timestep in timesteps:
            with torch.no_grad():
                expected = plain.unet(sample, timestep, text).sample
                output = pipe.unet(sample.to("neuron"), timestep, text.to("neuron")).sample
            difference = float((output.cpu() - expected).abs().max())
            rows.append((str(inputs[-1].dtype), inputs[-1].device.type, difference))
        return rows

    rows = run_forked("neuron", use, strict=True)
    assert [row[:2] for row in rows] == [("torch.float32", "neuron")] * len(timesteps)
    assert max(row[2] for row in rows) < 1e-5


def test_on_mps_prompts_run_one_by_one_and_slicing_gives_the_same_images() -> None:
    """Batches are not reliable on MPS; one generator for the whole batch gives the same images as on the CPU."""
    call: dict[str, Any] = {"height": 16, "width": 16, "num_inference_steps": 2, "output_type": "np"}
    prompts = ["an astronaut", "a horse"]

    def use(accelerator: VirtualAccelerator) -> tuple[list[int], list[GeneratedMedia]]:
        pipe = anyaccel.place(recipes()["stable-diffusion"].make(), "mps", dtype="float32")
        pipe.set_progress_bar_config(disable=True)
        sizes = record_rows(pipe.unet)
        batches = []
        for slices in (None, "auto", "max", 1):
            pipe.enable_attention_slicing(slices)
            batches.append(pipe(prompts, generator=torch.Generator().manual_seed(7), **call).images)
        return sizes, batches

    plain: Any = recipes()["stable-diffusion"].make()
    expected = plain(prompts, generator=torch.Generator().manual_seed(7), **call).images
    sizes, batches = run_forked("mps", use, strict=True)
    assert set(sizes) == {2}, "one image with guidance"
    assert max(abs(images - expected).max() for images in batches) < 1e-4
