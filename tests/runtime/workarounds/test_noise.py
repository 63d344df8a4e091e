"""Noise: a seed gives the same noise on every device, in every dtype and in every batch."""

from __future__ import annotations

import copy
import inspect
import warnings
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import anyaccel
from anyaccel.backends.device import open_device
from anyaccel.call_limits import read_seeds
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.errors import UsageError
from anyaccel.planning import PipelineFacts, PlacementOptions, make_plan
from anyaccel.recipes import recipes
from anyaccel.recipes.parts.calls import make_image
from anyaccel.runtime.workarounds.function_modes import make_model_function_mode, make_pipeline_function_mode
from anyaccel.runtime.workarounds.noise import (
    NoiseSource,
    NotPerImageError,
    PerImageNoise,
    make_generators,
    use_noise_source,
)
from tests.conftest import NEEDS_RECIPES
from tests.emulator.forked import DEVICES
from tests.runtime.workarounds.test_scheduler_tensors_on_cpu import (
    IMAGE_TO_IMAGE,
    INPAINT,
    TEXT_TO_IMAGE,
    make_pipe,
    make_scheduler,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BATCHES = (1, 3, 8)
SEEDS = tuple(range(11, 19))


def cpu_generator(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


def prepare(name: str, pipe: Any, images: int, **changes: Any) -> dict[str, Any]:
    """Return the arguments of a call for several prompts, without a generator."""
    arguments = recipes()[name].call() | {"num_inference_steps": 2, "output_type": "latent"}
    arguments |= {"generator": None, "prompt": [f"image {number}" for number in range(images)]}
    return arguments | changes


def generate(name: str, pipe: Any, images: int = 1, **changes: Any) -> torch.Tensor:
    result: torch.Tensor = pipe(**prepare(name, pipe, images, **changes)).images
    return result.float().cpu()


# Random functions under the function modes.


def draw_everything(device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    """Call every random function of torch once."""
    target = torch.ones(4, 3, dtype=dtype).to(device)
    chances = torch.full((4, 3), 0.5).to(device)
    return [
        torch.randn(4, 3, device=device, dtype=dtype),
        torch.randn((4, 3), device=device, dtype=dtype),
        torch.randn(size=(4, 3), device=str(device), dtype=dtype),
        torch.rand(4, 3, device=device, dtype=dtype),
        torch.randn_like(target),
        torch.rand_like(target),
        torch.empty_like(target).normal_(),
        torch.empty_like(target).uniform_(-1, 1),
        torch.empty_like(target).exponential_(),
        torch.randint(0, 100, (4, 3), device=device).to(dtype),
        torch.randint_like(target, 0, 100),
        torch.randperm(6, device=device).to(dtype),
        torch.multinomial(chances, 2, replacement=True).to(dtype),
        torch.bernoulli(chances).to(dtype),
        torch.normal(chances, chances).to(dtype),
    ]


def make_modes(accelerator: VirtualAccelerator) -> list[Any]:
    sheet = open_device(accelerator.name).sheet
    plan = make_plan(sheet, PipelineFacts(pipeline="Test"), PlacementOptions(), device=accelerator.name)
    modes = [make_pipeline_function_mode(plan, accelerator.device())]
    return modes + ([make_model_function_mode(plan, accelerator.device())] if "noise" in plan.workarounds.value else [])


@pytest.mark.parametrize("device", DEVICES)
def test_random_functions_return_float32_draws_of_the_cpu(device: str) -> None:
    def use(accelerator: VirtualAccelerator) -> None:
        torch.manual_seed(5)
        expected = draw_everything(torch.device("cpu"), torch.float32)
        for mode in make_modes(accelerator):
            for dtype in DTYPES:
                torch.manual_seed(5)
                with mode:
                    drawn_on_device = draw_everything(accelerator.device(), dtype)
                for index, (actual, expected_draw) in enumerate(zip(drawn_on_device, expected, strict=True)):
                    assert actual.device == accelerator.device(), index
                    assert actual.dtype is dtype, index
                    assert torch.equal(actual.cpu(), expected_draw.to(dtype)), f"draw {index} in {dtype}"
        assert accelerator.ledger.rows("error") == []

    run_forked(device, use, strict=True)


class DrawnDtypes(TorchFunctionMode):
    """Records the dtype of every draw of `torch.randn`."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.randn:
            self.dtypes.append(kwargs["dtype"])
        return func(*args, **(kwargs or {}))


def test_generator_of_the_caller_draws_in_the_requested_dtype() -> None:
    """Before torch 2.13 a draw in half precision is not the rounded draw in float32."""

    def use(accelerator: VirtualAccelerator) -> dict[str, list[torch.dtype]]:
        mode, seeds = make_modes(accelerator)[0], PerImageNoise([cpu_generator(5)])
        seen = {}
        for label, source, generator in (
            ("caller's", NoiseSource(), cpu_generator(5)),
            ("caller's, with seeds", seeds, cpu_generator(5)),
            ("of a seed", seeds, seeds.generators[0]),
            ("none", NoiseSource(), None),
        ):
            with DrawnDtypes() as drawn, use_noise_source(source), mode:
                torch.randn(4, 3, device=accelerator.device(), dtype=torch.bfloat16, generator=generator)
            seen[label] = drawn.dtypes
        return seen

    assert run_forked("hpu", use, strict=True) == {
        "caller's": [torch.bfloat16],
        "caller's, with seeds": [torch.bfloat16],
        "of a seed": [torch.float32],
        "none": [torch.float32],
    }


def draw_normal(shape: tuple[int, ...], generator: torch.Generator | None) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


def test_noise_of_several_images_must_come_from_their_own_generators() -> None:
    source = PerImageNoise(make_generators((5, 6)))
    for generator, seed in zip(source.generators, (5, 6), strict=True):
        drawn = source.draw("randn", draw_normal, (1, 3), generator)
        assert torch.equal(drawn, torch.randn(1, 3, generator=cpu_generator(seed)))
    source.check_finished()
    with pytest.raises(NotPerImageError, match="no generator"):
        source.draw("randn", draw_normal, (2, 3), None)
    source.draw("randn", draw_normal, (1, 3), source.generators[0])
    with pytest.raises(NotPerImageError, match="for the other images"):
        source.check_finished()


def draw_each_way(generator: torch.Generator) -> list[torch.Tensor]:
    """Draw with functions that get the shape in different ways."""
    chances, template = torch.linspace(0.1, 0.9, 12).reshape(3, 4), torch.zeros(3, 4)
    return [
        torch.randint(0, 100, (3, 4), generator=generator),
        torch.randint(100, size=(3, 4), generator=generator),
        torch.multinomial(chances, 2, generator=generator),
        torch.bernoulli(chances, generator=generator),
        torch.normal(chances, chances, generator=generator),
        torch.normal(0.0, 1.0, (3, 4), generator=generator),
        template.clone().exponential_(generator=generator),
        template.clone().bernoulli_(chances, generator=generator),
    ]


def test_every_random_function_draws_the_values_of_the_cpu() -> None:
    plan = make_plan(anyaccel.sheet("cpu"), PipelineFacts(pipeline="Test"), PlacementOptions(), device="cpu")
    expected = draw_each_way(cpu_generator(5))
    with make_pipeline_function_mode(plan, torch.device("cpu")):
        actual = draw_each_way(cpu_generator(5))
    assert all(map(torch.equal, actual, expected))


def test_noise_sources_can_be_nested() -> None:
    sheet = anyaccel.sheet("neuron")
    plan = make_plan(sheet, PipelineFacts(pipeline="Test"), PlacementOptions(), device="meta")
    mode = make_pipeline_function_mode(plan, torch.device("meta"))
    torch.manual_seed(1)
    with use_noise_source(PerImageNoise([cpu_generator(5)])), mode:
        inner = torch.randn(3)
        with use_noise_source(PerImageNoise([cpu_generator(6)])):
            innermost = torch.randn(3)
        again = torch.randn(3)
    outer = cpu_generator(5)
    assert torch.equal(inner, torch.randn(3, generator=outer))
    assert torch.equal(innermost, torch.randn(3, generator=cpu_generator(6)))
    assert torch.equal(again, torch.randn(3, generator=outer)), "the outer source continues where it stopped"
    with mode:
        outside = torch.randn(3)
    torch.manual_seed(1)
    assert torch.equal(outside, torch.randn(3))


# Seeds


def test_seeds_are_read() -> None:
    assert read_seeds(7, 1) == (7,)
    assert read_seeds(7, 3) == (7, 8, 9)
    assert read_seeds([7, 3], 2) == (7, 3)
    assert read_seeds((7,), 1) == (7,)
    assert read_seeds(torch.tensor(4), 2) == (4, 5)
    assert read_seeds(2**64 - 1, 2) == (2**64 - 1, 0)


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, "7", True, [1, -2], [1, "2"], [True, 2]])
def test_invalid_seeds_raise(seed: Any) -> None:
    with pytest.raises(UsageError, match="a seed must be an integer") as caught:
        read_seeds(seed, 2)
    assert "seed=7" in caught.value.hint


def test_wrong_number_of_seeds_raises() -> None:
    for seeds in ([1], [1, 2, 3], []):
        with pytest.raises(UsageError, match="for 2 images"):
            read_seeds(seeds, 2)


# Pipelines


def first_inputs(pipe: Any, model: str) -> list[torch.Tensor]:
    """Return a list that receives the input of every pass of the denoiser."""
    seen: list[torch.Tensor] = []

    def record_input(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append((args[0] if args else kwargs["hidden_states"]).cpu().clone())

    getattr(pipe, model).register_forward_pre_hook(record_input, with_kwargs=True)
    return seen


def without_guidance(pipe: Any) -> dict[str, Any]:
    """Return arguments for one step with one pass."""
    scales = set(inspect.signature(pipe.__call__).parameters) & {"guidance_scale", "true_cfg_scale"}
    return dict.fromkeys(scales, 1.0) | {"num_inference_steps": 1}


def first_noise(name: str, model: str, device: str, dtype: torch.dtype, batches: tuple[int, ...]) -> list[torch.Tensor]:
    """Return the first noise for several batch sizes, with the seeds of `SEEDS`."""
    pipe = make_pipe(name) if model == "unet" else recipes()[name].make()
    pipe = anyaccel.place(pipe, device, dtype=dtype)
    seen, actual = first_inputs(pipe, model), []
    for batch in batches:
        seen.clear()
        generate(name, pipe, batch, seed=list(SEEDS[:batch]), **without_guidance(pipe))
        actual.append(torch.cat(seen))
    return actual


def reference_noise(name: str, model: str) -> torch.Tensor:
    """Return the noise of each seed as drawn by diffusers on the CPU in float32."""
    pipe = make_pipe(name) if model == "unet" else recipes()[name].make()
    seen = first_inputs(pipe, model)
    for seed in SEEDS:
        generate(name, pipe, 1, generator=cpu_generator(seed), **without_guidance(pipe))
    return torch.cat(seen)


def check_first_noise(device: str, name: str, model: str, dtypes: tuple[torch.dtype, ...]) -> None:
    def use(accelerator: VirtualAccelerator | None) -> None:
        warnings.simplefilter("ignore")
        expected = reference_noise(name, model)
        for dtype in dtypes:
            for batch, actual in zip(BATCHES, first_noise(name, model, device, dtype, BATCHES), strict=True):
                assert actual.dtype is dtype
                assert torch.equal(actual, expected[:batch].to(dtype)), f"{dtype}, batch size {batch}"
        assert not torch.equal(expected[0], expected[1])

    if device == "cpu":
        with warnings.catch_warnings():
            use(None)
    else:
        run_forked(device, use, strict=True)


@NEEDS_RECIPES
@pytest.mark.parametrize(
    "device",
    ["cpu", *(pytest.param(name, marks=() if name in ("mps", "neuron") else pytest.mark.slow) for name in DEVICES)],
)
def test_seed_gives_the_same_noise_on_every_device_dtype_and_batch_size(device: str) -> None:
    """Slow on the devices that differ from Neuron only in their sheet."""
    check_first_noise(device, TEXT_TO_IMAGE, "unet", DTYPES)


@NEEDS_RECIPES
@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", *DEVICES])
@pytest.mark.parametrize("name", ["flux", "stable-diffusion-3"])
def test_seed_gives_the_same_noise_for_transformers(device: str, name: str) -> None:
    check_first_noise(device, name, "transformer", DTYPES)


SINGLE_IMAGE_CASES = {
    "DDIM": (TEXT_TO_IMAGE, "DDIM"),
    "EulerAncestralDiscrete": (TEXT_TO_IMAGE, "EulerAncestralDiscrete"),
    "LCM": (TEXT_TO_IMAGE, "LCM"),
    "sde": (TEXT_TO_IMAGE, "DPMSolverMultistep-sde"),
    "shared input image": (IMAGE_TO_IMAGE, "DDPM"),
    "shared input image and mask": (INPAINT, "DDPM"),
}


@NEEDS_RECIPES
def test_image_in_a_batch_equals_the_single_image() -> None:
    """With schedulers that draw at every step, and with a shared input image."""

    def use(accelerator: VirtualAccelerator) -> dict[str, list[float]]:
        warnings.simplefilter("ignore")
        seen: dict[str, list[float]] = {}
        for label, (name, variant) in SINGLE_IMAGE_CASES.items():
            pipe = make_pipe(name)
            pipe.scheduler = make_scheduler(variant, pipe.scheduler)
            pipe = anyaccel.place(pipe, accelerator.name, dtype=torch.float32)
            steps: dict[str, Any] = {"num_inference_steps": 3, "strength": 0.7} if name != TEXT_TO_IMAGE else {}
            together = generate(name, pipe, 3, seed=[4, 9, 2], **steps)
            single = [
                generate(name, pipe, prompt=f"image {row}", seed=seed, **steps) for row, seed in enumerate([4, 9, 2])
            ]
            seen[label] = [float((together[row] - single[row][0]).abs().max()) for row in range(3)]
            assert (together[0] - together[1]).abs().max() > 0.1
            reordered = generate(name, pipe, prompt=[f"image {row}" for row in (2, 0)], seed=[2, 4], **steps)
            seen[label] += [float((reordered[row] - together[image]).abs().max()) for row, image in ((0, 2), (1, 0))]
        return seen

    for label, differences in run_forked("neuron", use, strict=True).items():
        assert max(differences) < 1e-4, label


@NEEDS_RECIPES
def test_images_per_prompt_from_one_input_image_equal_single_images() -> None:
    """Diffusers encodes a shared input image once, with the generator of the first image."""
    names = ("flux-image-to-image", "stable-diffusion-xl-inpaint")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            pipe = anyaccel.place(recipes()[name].make(), "cpu", dtype=torch.float32)
            together = generate(name, pipe, prompt="a fox", num_images_per_prompt=2, seed=[4, 9])
            single = [generate(name, pipe, prompt="a fox", seed=seed) for seed in (4, 9)]
            for row in range(2):
                assert (together[row] - single[row][0]).abs().max() < 1e-4, name
            input_images = [make_image(32, seed=1), make_image(32, seed=2)]
            both = generate(name, pipe, prompt=["a fox", "a hen"], image=input_images, seed=[4, 9])
            second = generate(name, pipe, prompt="a hen", image=input_images[1], seed=9)
            assert (both[1] - second[0]).abs().max() < 1e-4, name


@NEEDS_RECIPES
def test_generators_of_the_caller_match_diffusers() -> None:
    """A CPU generator, a list of generators, and the default generator."""

    def use(accelerator: VirtualAccelerator) -> dict[str, float]:
        warnings.simplefilter("ignore")
        plain = make_pipe(TEXT_TO_IMAGE)
        plain.scheduler = make_scheduler("EulerAncestralDiscrete", plain.scheduler)
        placed = anyaccel.place(copy.deepcopy(plain), accelerator.name, dtype=torch.float32)
        seen = {}
        for label in ("one", "list", "default"):
            results = []
            for pipe in (plain, placed):
                torch.default_generator.manual_seed(8)
                generators = [cpu_generator(5), cpu_generator(6)]
                generator = {"one": cpu_generator(5), "list": generators, "default": None}[label]
                results.append(generate(TEXT_TO_IMAGE, pipe, 2, generator=generator))
            seen[label] = float((results[1] - results[0]).abs().max())
        generator = cpu_generator(5)
        first, second = (generate(TEXT_TO_IMAGE, placed, 1, generator=generator) for _ in range(2))
        assert not torch.equal(first, second), "a generator continues from call to call"
        both = cpu_generator(5)
        again = [generate(TEXT_TO_IMAGE, plain, 1, generator=both) for _ in range(2)]
        seen["goes on"] = float((second - again[1]).abs().max())
        seeded = generate(TEXT_TO_IMAGE, placed, 1, seed=5)
        seen["seed is a generator"] = float((seeded - first).abs().max())
        return seen

    for device in ("neuron", "mps"):
        for label, difference in run_forked(device, use, strict=True).items():
            assert difference < 1e-4, f"{device}: {label}"


@NEEDS_RECIPES
def test_device_generators_draw_on_the_device() -> None:
    def use(accelerator: VirtualAccelerator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        warnings.simplefilter("ignore")
        placed = anyaccel.place(make_pipe(TEXT_TO_IMAGE), accelerator.name, dtype=torch.float32)
        generators = [torch.Generator(accelerator.name).manual_seed(5) for _ in range(2)]
        first, second = (generate(TEXT_TO_IMAGE, placed, generator=generator) for generator in generators)
        other = torch.Generator(accelerator.name).manual_seed(6)
        return first, second, generate(TEXT_TO_IMAGE, placed, generator=other)

    first, second, other = run_forked("xpu", use, strict=True)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


@NEEDS_RECIPES
def test_seed_together_with_generator_raises() -> None:
    pipe = anyaccel.place(make_pipe(TEXT_TO_IMAGE), "cpu", dtype=torch.float32)
    with pytest.raises(UsageError, match="cannot be used together"):
        generate(TEXT_TO_IMAGE, pipe, seed=1, generator=cpu_generator(1))
    with pytest.raises(UsageError, match="got 2 seeds for 3 images"):
        generate(TEXT_TO_IMAGE, pipe, 3, seed=[1, 2])
    result = pipe(**prepare(TEXT_TO_IMAGE, pipe, 2, seed=6))
    assert result.seeds == (6, 7)
