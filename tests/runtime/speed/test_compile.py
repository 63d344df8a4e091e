"""Compilation and warm-up: one graph per size, a cache across processes, and no side effects."""

import logging
import os
from pathlib import Path
from typing import Any

import diffusers
import numpy
import pytest
import torch

import anyaccel
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.errors import UnknownComponentError, UsageError
from anyaccel.recipes import recipes, run
from tests.conftest import NEEDS_RECIPES
from tests.runtime.speed.small_pipelines import make_small

pytestmark = [NEEDS_RECIPES, pytest.mark.usefixtures("pipelines_imported", "compiler_imported")]
CALL: dict[str, Any] = {"num_inference_steps": 2, "output_type": "np", "seed": 1}
SIZES = [(16, 16), (32, 16)]


def make(device: str = "neuron", name: str = "stable-diffusion", full: bool = False) -> Any:
    """Return a placed pipeline; by default with a one-level UNet, because tracing a full one takes seconds."""
    pipe = anyaccel.place(recipes()[name].make() if full else make_small(name), device, dtype="fp32")
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.long
def test_one_graph_per_size_and_none_in_a_second_process(tmp_path: Path) -> None:
    def use(accelerator: VirtualAccelerator) -> tuple[Any, ...]:
        messages: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("anyaccel").addHandler(handler)
        pipe = make()
        eager = [pipe("a fox", height=height, width=width, **CALL).images for height, width in SIZES]
        before = dict(os.environ)
        pipe.enable_neuron_compile(cache_dir=tmp_path)
        counts, images = [], []
        for height, width in [*SIZES, *SIZES]:
            images.append(pipe("a fox", height=height, width=width, **CALL).images)
            counts.append(len(accelerator.compiler.graphs))
        worst = max(numpy.abs(a - b).max() for a, b in zip([*eager, *eager], images, strict=True))
        buckets = pipe.plan.report.compiled_sizes.value
        return counts, accelerator.compiler.compiled, float(worst), dict(os.environ) == before, buckets, messages

    def use_again(accelerator: VirtualAccelerator) -> tuple[int, int]:
        pipe = make()
        pipe.enable_neuron_compile(cache_dir=tmp_path)
        pipe("a fox", height=SIZES[0][0], width=SIZES[0][1], **CALL)
        return len(accelerator.compiler.graphs), accelerator.compiler.compiled

    counts, compiled, worst, same_environment, buckets, messages = run_forked("neuron", use)
    assert counts == [1, 2, 2, 2]
    assert compiled == 2
    assert worst < 1e-3
    assert same_environment
    assert buckets == ("16 × 16, 1 image", "32 × 16, 1 image")
    [message] = messages
    assert "compiling for the new size 32 × 16, 1 image" in message
    assert "16 × 16" in message
    assert len(list(tmp_path.glob("*.json"))) == 2
    assert run_forked("neuron", use_again) == (1, 0)


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        "flux",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("wan", "stable-diffusion-xl", "pixart-alpha", "flux-2-klein", "ltx")
        ),
    ],
)
def test_each_denoiser_compiles_to_one_graph(name: str) -> None:
    recipe = recipes()[name]
    expected = run(recipe, recipe.make())

    def use(accelerator: VirtualAccelerator) -> tuple[int, int, float, list[Any]]:
        pipe = make(name=name, full=True)
        pipe.enable_compile()
        accelerator.ledger.clear()
        seen = run(recipe, pipe)
        graphs = len(accelerator.compiler.graphs)
        run(recipe, pipe)
        bad = accelerator.ledger.rows("error")
        return graphs, len(accelerator.compiler.graphs), float(abs(expected - seen).max()), bad

    graphs, later, difference, bad = run_forked("neuron", use, strict=True)
    assert (graphs, later) == (1, 1)
    assert difference < 1e-3
    assert bad == []


@pytest.mark.long
@pytest.mark.parametrize("images", [10, pytest.param(100_000, marks=pytest.mark.slow)])
def test_models_with_workarounds_compile_on_request(images: int) -> None:
    """FLUX calls `unflatten`, which Dynamo cannot trace inside a torch function mode."""
    recipe = recipes()["flux"]
    expected = run(recipe, recipe.make())

    def use(accelerator: VirtualAccelerator) -> tuple[Any, ...]:
        pipe = anyaccel.place(recipe.make(), "neuron", dtype="fp32", compile=True, expected_images=images)
        pipe.set_progress_bar_config(disable=True)
        seen = run(recipe, pipe)
        return (
            pipe.plan.report.compiled_models.value,
            len(accelerator.compiler.graphs),
            float(abs(expected - seen).max()),
        )

    compiled, graphs, difference = run_forked("neuron", use)
    assert "transformer" in compiled
    assert graphs >= 1
    assert difference < 1e-3


@pytest.mark.long
def test_warmup_does_not_change_the_next_image(tmp_path: Path) -> None:
    """Calls without a seed, which use the default generator, are not affected either."""
    call = {name: value for name, value in CALL.items() if name != "seed"} | {"height": 16, "width": 16}

    def use(accelerator: VirtualAccelerator) -> tuple[Any, ...]:
        cold, warm = make(), make()
        torch.manual_seed(5)
        expected = cold("a fox", **call).images
        warm("a fox", **call)
        before, timesteps = dict(os.environ), warm.scheduler.timesteps
        torch.manual_seed(5)
        warm.enable_neuron_compile(cache_dir=tmp_path)
        warm.warmup([(16, 16), {"height": 16, "width": 16}])
        warm.neuron_warmup("a fox", height=16, width=32)
        graphs = len(accelerator.compiler.graphs)
        timesteps_unchanged = torch.equal(timesteps, warm.scheduler.timesteps)
        seen = warm("a fox", **call).images
        same = dict(os.environ) == before
        return (
            expected,
            seen,
            graphs,
            len(accelerator.compiler.graphs),
            timesteps_unchanged,
            same,
            warm._progress_bar_config,
        )

    expected, seen, graphs, later, timesteps_unchanged, same_environment, config = run_forked("neuron", use)
    assert numpy.abs(expected - seen).max() < 1e-3
    assert (graphs, later) == (2, 2)
    assert timesteps_unchanged
    assert same_environment
    assert config == {"disable": True}


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["stable-diffusion-image-to-image", pytest.param("stable-diffusion-inpaint", marks=pytest.mark.slow)]
)
def test_warmup_of_pipelines_with_an_input_image(name: str) -> None:
    def use(accelerator: VirtualAccelerator) -> int:
        pipe = make(name=name)
        pipe.enable_compile()
        pipe.warmup(**({"height": 64, "width": 64} if name.endswith("inpaint") else {}))
        return len(accelerator.compiler.graphs)

    assert run_forked("neuron", use) == 1


@pytest.mark.long
def test_compile_accepts_all_or_named_models() -> None:
    def use(accelerator: VirtualAccelerator) -> tuple[Any, ...]:
        recipe = recipes()["stable-diffusion"]
        expected = run(recipe, make_small())
        pipe = make()
        pipe.enable_compile("all")
        difference = float(abs(expected - run(recipe, pipe)).max())
        with pytest.raises(UnknownComponentError, match=r"no model named 'unett'") as caught:
            make().enable_neuron_compile(["unett"])
        return pipe.plan.report.compiled_models.value, len(accelerator.compiler.graphs), difference, str(caught.value)

    compiled, graphs, difference, message = run_forked("neuron", use)
    assert set(compiled) >= {"unet", "vae", "text_encoder"}
    assert graphs == 3
    assert difference < 1e-3
    assert "did you mean unet? known: vae, text_encoder, unet" in message


@pytest.mark.filterwarnings("ignore")  # torch warns while it imports Inductor
def test_ptxas_path_is_set_before_the_backend_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    tasks = "torch._inductor.runtime.compile_tasks._set_triton_ptxas_path"
    monkeypatch.setattr(tasks, lambda: messages.append("path set"))
    backends: Any = torch._dynamo
    monkeypatch.setattr(backends, "lookup_backend", lambda name: messages.append(name))
    pipe = make("cpu")
    pipe.enable_compile("unet")
    assert messages == ["path set"], "enable_compile must set the path before the backend is looked up"


@pytest.mark.parametrize("shapes", [[], [3], [("a", "b")], [(1, 2, 3)]])
def test_warmup_rejects_invalid_shapes(shapes: Any) -> None:
    with pytest.raises(UsageError, match="shape"):
        make("cpu").warmup(shapes)


def save_adapter(rank: int, seed: int, folder: Path) -> None:
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    pipe = make_small()
    pipe.unet.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=["to_q", "to_v"]))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in pipe.unet.named_parameters():
        if "lora" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator)
    pipeline_class: Any = diffusers.StableDiffusionPipeline
    pipeline_class.save_lora_weights(folder, unet_lora_layers=get_peft_model_state_dict(pipe.unet))


@pytest.mark.filterwarnings("ignore")  # peft and diffusers warn while they load
def test_swapping_an_adapter_does_not_recompile(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("first", "second")]
    for seed, folder in enumerate(folders):
        save_adapter(4 - 2 * seed, seed, folder)
    call = {**CALL, "height": 16, "width": 16}

    def use(accelerator: VirtualAccelerator) -> tuple[Any, ...]:
        expected = []
        for folder in folders:
            plain = make("cpu")
            plain.load_lora_weights(folder, adapter_name="style")
            expected.append(plain("a fox", **call).images)
        pipe = make()
        pipe.enable_lora_hotswap(target_rank=4)
        pipe.load_lora_weights(folders[0], adapter_name="style")
        pipe.enable_neuron_compile()
        first = pipe("a fox", **call).images
        graphs = len(accelerator.compiler.graphs)
        pipe.load_lora_weights(folders[1], adapter_name="style", hotswap=True)
        second = pipe("a fox", **call).images
        return expected, [first, second], graphs, len(accelerator.compiler.graphs)

    expected, seen, graphs, later = run_forked("neuron", use)
    assert (graphs, later) == (1, 1)
    assert numpy.abs(seen[0] - seen[1]).max() > 0.05
    for expected_image, image in zip(expected, seen, strict=True):
        assert numpy.abs(expected_image - image).max() < 1e-3
