"""Schedulers with tensors on the CPU give the same latents as plain diffusers and never synchronize in a step."""

from __future__ import annotations

import copy
import inspect
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import numpy
import pytest
import torch
from diffusers.schedulers.scheduling_utils import KarrasDiffusionSchedulers

import anyaccel
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.recipes import recipes
from anyaccel.runtime.workarounds.scheduler_tensors_on_cpu import CpuTensors, keep_on_cpu
from tests.conftest import NEEDS_RECIPES

pytestmark = NEEDS_RECIPES

TEXT_TO_IMAGE = "stable-diffusion"
IMAGE_TO_IMAGE = "stable-diffusion-image-to-image"
INPAINT = "stable-diffusion-inpaint"
KINDS = (TEXT_TO_IMAGE, IMAGE_TO_IMAGE, INPAINT)
STEPS = 4
TOLERANCE = 1e-3

WORKS = (
    "CMStochasticIterative", "CogVideoXDDIM", "DDIM", "DDIMParallel", "DDPM", "DDPMParallel", "DEISMultistep",
    "DPMSolverMultistep", "DPMSolverMultistepInverse", "DPMSolverSinglestep", "EDMDPMSolverMultistep", "EDMEuler",
    "EulerAncestralDiscrete", "EulerDiscrete", "HeunDiscrete", "KDPM2AncestralDiscrete", "KDPM2Discrete", "LCM",
    "PNDM", "SASolver", "TCD", "UniPCMultistep",
)  # fmt: skip
"""Schedulers that work with every Stable Diffusion pipeline, without the suffix `Scheduler`."""
ADDS_NO_NOISE = ("DDIMInverse", "IPNDM")
"""Schedulers without `add_noise`: text-to-image only."""
NEEDS_A_PACKAGE = {"CosineDPMSolverMultistep": "torchsde", "DPMSolverSDE": "torchsde", "LMSDiscrete": "scipy"}
"""Tested only if the package is installed."""
FLOW_MATCHING = ("FlowMatchEulerDiscrete", "FlowMatchHeunDiscrete", "FlowMatchLCM")
OF_OTHER_MODELS = (
    "Amused", "BlockRefinement", "CogVideoXDPM", "DDPMWuerstchen", "DiscreteDDIM", "EntropyBound",
    "FlowMapEulerDiscrete", "HeliosDMD", "Helios", "KarrasVe", "LTXEulerAncestralRF", "MiniMaxH3", "Piflow",
    "RFD4Proteina", "RePaint", "SCM", "ScoreSdeVe", "UnCLIP", "VQDiffusion",
)  # fmt: skip
"""Schedulers that Stable Diffusion cannot use on any device."""
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "DDIM-with-variance": ("DDIM", {}),
    "DPMSolverMultistep-sde": ("DPMSolverMultistep", {"algorithm_type": "sde-dpmsolver++", "use_karras_sigmas": True}),
    "EulerDiscrete-karras": ("EulerDiscrete", {"use_karras_sigmas": True, "timestep_spacing": "trailing"}),
    "HeunDiscrete-karras": ("HeunDiscrete", {"use_karras_sigmas": True}),
    "UniPCMultistep-flow": ("UniPCMultistep", {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}),
    "PNDM-runge-kutta": ("PNDM", {"skip_prk_steps": False}),
}
VARIANTS = {name: (name, dict[str, Any]()) for name in (*WORKS, *ADDS_NO_NOISE, *NEEDS_A_PACKAGE)} | OPTIONS
DRAWS_AT_EVERY_STEP = ("DDIM-with-variance", "DDPM", "DPMSolverMultistep-sde", "EulerAncestralDiscrete", "LCM")
"""A selection of the schedulers that draw noise in `step`."""


def make_scheduler(variant: str, before: Any) -> Any:
    name, options = VARIANTS.get(variant) or (variant, {})
    return getattr(diffusers, f"{name}Scheduler").from_config(before.config, **options)


def make_pipe(name: str, *, full: bool = False) -> Any:
    """Return a tiny pipeline; by default with a one-block denoiser, because only the scheduler is tested."""
    pipe: Any = recipes()[name].make()
    if not full:
        config = pipe.unet.config
        make: Any = diffusers.UNet2DConditionModel
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            pipe.unet = make(
                sample_size=config.sample_size,
                in_channels=config.in_channels,
                out_channels=config.out_channels,
                cross_attention_dim=config.cross_attention_dim,
                block_out_channels=(8,),
                down_block_types=("DownBlock2D",),
                up_block_types=("UpBlock2D",),
                mid_block_type=None,
                layers_per_block=1,
                norm_num_groups=2,
            ).eval()
    return pipe


def call(name: str, pipe: Any, seed: int = 7, **changes: Any) -> torch.Tensor:
    """Return the latents of one call with a CPU generator."""
    arguments = recipes()[name].call() | {"num_inference_steps": STEPS, "output_type": "latent"} | changes
    if "strength" in inspect.signature(pipe.__call__).parameters:
        arguments.setdefault("strength", 0.6)
    arguments["generator"] = torch.Generator("cpu").manual_seed(seed)
    if name in KINDS:  # the text encoder is the same for every scheduler
        embeds = torch.randn(2, 77, pipe.unet.config.cross_attention_dim, generator=torch.Generator().manual_seed(2))
        del arguments["prompt"]
        arguments |= {"prompt_embeds": embeds[:1].to(pipe.device), "negative_prompt_embeds": embeds[1:].to(pipe.device)}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # some pipelines pass no generator to `step`
        result: torch.Tensor = pipe(**arguments).images
    return result.float().cpu()


def find_problems(accelerator: VirtualAccelerator) -> list[str]:
    """Return errors, wrong results, and synchronizations inside a step."""
    return [
        f"{row.effect}: {row.limit} by {row.operation} at {row.file}:{row.line}, step {row.step}"
        for row in accelerator.ledger.rows()
        if row.effect in ("error", "wrong") or (row.limit == "host_round_trip" and row.step is not None)
    ]


@dataclass(frozen=True)
class Outcome:
    """Comparison of a call on a device with plain diffusers on the CPU."""

    difference: float
    spread: float
    """The largest CPU latent, to show that the latents are not all zero."""
    problems: list[str]
    left: list[str]
    """Attributes of the scheduler that the call left changed."""


def compare(accelerator: VirtualAccelerator, name: str, plain: Any, placed: Any, **changes: Any) -> Outcome:
    expected = call(name, plain, **changes)
    accelerator.ledger.clear()
    actual = call(name, placed, **changes)
    problems = find_problems(accelerator)
    return Outcome(float((actual - expected).abs().max()), float(expected.abs().max()), problems, find_traces(placed))


def find_traces(pipe: Any) -> list[str]:
    """Return the overrides and device tensors that a call left on the scheduler."""
    attributes = vars(pipe.scheduler)
    methods = [name for name, value in attributes.items() if callable(value) and hasattr(type(pipe.scheduler), name)]
    tensors = {
        name: value for name, value in attributes.items() if isinstance(value, torch.Tensor) and value.dim() <= 1
    }
    return methods + [name for name, value in tensors.items() if value.device.type != "cpu"]


def is_missing(variant: str) -> bool:
    return "dummy" in type(getattr(diffusers, f"{VARIANTS[variant][0]}Scheduler")).__module__ or (
        "dummy" in getattr(diffusers, f"{VARIANTS[variant][0]}Scheduler").__module__
    )


def sweep(device: str, kinds: tuple[str, ...], full: bool) -> dict[tuple[str, str], Outcome]:
    """Run every scheduler with every kind of pipeline."""

    def use(accelerator: VirtualAccelerator) -> dict[tuple[str, str], Outcome]:
        warnings.simplefilter("ignore")
        outcomes = {}
        for kind in kinds:
            plain = make_pipe(kind, full=full)
            placed = anyaccel.place(copy.deepcopy(plain), device, dtype=torch.float32)
            before = plain.scheduler
            for variant in VARIANTS:
                if is_missing(variant) or (variant in ADDS_NO_NOISE and kind != TEXT_TO_IMAGE):
                    continue
                plain.scheduler, placed.scheduler = make_scheduler(variant, before), make_scheduler(variant, before)
                options = {"eta": 1.0} if variant == "DDIM-with-variance" else {}
                outcomes[variant, kind] = compare(accelerator, kind, plain, placed, **options)
        return outcomes

    return run_forked(device, use, strict=True)


def find_faults(device: str, kinds: tuple[str, ...] = KINDS, full: bool = False) -> dict[tuple[str, str], Outcome]:
    """Return the combinations that differ from the CPU, synchronize, or leave something behind."""
    outcomes = sweep(device, kinds, full)
    without_noise = {TEXT_TO_IMAGE} & set(kinds)
    expected_kinds = {variant: without_noise if variant in ADDS_NO_NOISE else set(kinds) for variant in VARIANTS}
    expected = {
        (name, kind) for name, pipelines in expected_kinds.items() if not is_missing(name) for kind in pipelines
    }
    assert set(outcomes) == expected
    return {
        key: outcome
        for key, outcome in outcomes.items()
        if outcome.problems or outcome.left or outcome.difference >= TOLERANCE or outcome.spread <= 0.1
    }


@pytest.mark.parametrize("variant", NEEDS_A_PACKAGE)
def test_schedulers_with_optional_packages_are_included(variant: str) -> None:
    """Other tests leave these schedulers out silently; this test reports them as skipped."""
    if is_missing(variant):
        pytest.skip(f"diffusers needs {NEEDS_A_PACKAGE[variant]} for {variant}, which is not installed")
    assert variant in VARIANTS


def test_every_scheduler_of_diffusers_is_listed() -> None:
    listed = {*VARIANTS, *FLOW_MATCHING, *OF_OTHER_MODELS}
    available = {
        name.removesuffix("Scheduler")
        for name in dir(diffusers)
        if name.endswith("Scheduler") and not name.startswith("Flax")
    }
    assert available - listed == set()
    karras = {member.name.removesuffix("Scheduler") for member in KarrasDiffusionSchedulers}
    assert karras - {*WORKS, *NEEDS_A_PACKAGE} == set()


@pytest.mark.long
def test_schedulers_match_the_cpu_and_never_synchronize() -> None:
    """The next test and the slow one cover the other kinds of pipelines."""
    assert find_faults("neuron", (TEXT_TO_IMAGE,)) == {}


def test_schedulers_match_the_cpu_where_scalar_offsets_are_ignored() -> None:
    """MPS with torch 2.13 reads `sigmas[0]` instead of `sigmas[3]` of a CPU tensor."""
    assert find_faults("mps", (IMAGE_TO_IMAGE,)) == {}


def test_scheduler_on_the_device_synchronizes() -> None:
    """Shows that `find_problems` detects synchronizations."""

    def use(accelerator: VirtualAccelerator) -> tuple[str, list[str]]:
        warnings.simplefilter("ignore")
        pipe = anyaccel.place(make_pipe(TEXT_TO_IMAGE), "neuron", dtype=torch.float32, scheduler="device")
        pipe.scheduler = make_scheduler("EulerDiscrete", pipe.scheduler)
        call(TEXT_TO_IMAGE, pipe)
        return pipe.scheduler.timesteps.device.type, find_problems(accelerator)

    device, problems = run_forked("neuron", use)
    assert device == "neuron"
    assert any("host_round_trip" in problem for problem in problems)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["neuron", "mps", "hpu"])
def test_schedulers_match_the_cpu_with_the_full_denoiser(device: str) -> None:
    assert find_faults(device, full=True) == {}


def test_noise_drawn_by_schedulers_matches_the_cpu() -> None:
    """The initial latents are fixed, so a different seed changes only the noise of the steps."""

    def use(accelerator: VirtualAccelerator) -> dict[str, tuple[float, float]]:
        warnings.simplefilter("ignore")
        plain = make_pipe(TEXT_TO_IMAGE)
        placed = anyaccel.place(copy.deepcopy(plain), "neuron", dtype=torch.float32)
        before, seen = plain.scheduler, {}
        size: dict[str, Any] = {"height": 16, "width": 16}
        side = 16 // plain.vae_scale_factor
        first = torch.randn(1, 4, side, side, generator=torch.Generator().manual_seed(1))
        for variant in DRAWS_AT_EVERY_STEP:
            plain.scheduler, placed.scheduler = make_scheduler(variant, before), make_scheduler(variant, before)
            options = size | ({"eta": 1.0} if variant == "DDIM-with-variance" else {})
            expected = call(TEXT_TO_IMAGE, plain, latents=first.clone(), **options)
            actual = call(TEXT_TO_IMAGE, placed, latents=first.clone(), **options)
            other = call(TEXT_TO_IMAGE, placed, seed=8, latents=first.clone(), **options)
            seen[variant] = float((actual - expected).abs().max()), float((other - actual).abs().max())
        return seen

    for variant, (difference, by_seed) in run_forked("neuron", use, strict=True).items():
        assert difference < TOLERANCE, variant
        assert by_seed > 0.01, variant


@dataclass(frozen=True)
class Custom:
    """A custom schedule."""

    scheduler: str
    arguments: dict[str, Any]


CUSTOM = {
    "timesteps-ddpm": Custom("DDPM", {"timesteps": [900, 500, 300, 20]}),
    "timesteps-dpm": Custom("DPMSolverMultistep", {"timesteps": [900, 500, 300, 20]}),
    "timesteps-lcm": Custom("LCM", {"timesteps": [959, 699, 399, 19]}),
    "timesteps-heun": Custom("HeunDiscrete", {"timesteps": [900, 500, 300, 20]}),
    "timesteps-euler": Custom("EulerDiscrete", {"timesteps": [900, 500, 300, 20]}),
    "sigmas-euler": Custom("EulerDiscrete", {"sigmas": [14.0, 6.0, 2.0, 0.5]}),
    "sigmas-unipc": Custom("UniPCMultistep-flow", {"sigmas": numpy.array([0.99, 0.9, 0.5, 0.1])}),
}


def test_custom_timesteps_and_sigmas_match_the_cpu() -> None:
    def use(accelerator: VirtualAccelerator) -> dict[str, Outcome]:
        warnings.simplefilter("ignore")
        plain = make_pipe(TEXT_TO_IMAGE)
        placed = anyaccel.place(copy.deepcopy(plain), "neuron", dtype=torch.float32)
        before = plain.scheduler
        outcomes = {}
        for name, custom in CUSTOM.items():
            plain.scheduler = make_scheduler(custom.scheduler, before)
            placed.scheduler = make_scheduler(custom.scheduler, before)
            outcomes[name] = compare(accelerator, TEXT_TO_IMAGE, plain, placed, **custom.arguments)
        return outcomes

    for name, outcome in run_forked("neuron", use, strict=True).items():
        assert outcome.problems == [], name
        assert outcome.difference < TOLERANCE, name


def test_base_and_refiner_match_the_cpu() -> None:
    """With `denoising_end` and `denoising_start`."""
    base, refiner = "stable-diffusion-xl", "stable-diffusion-xl-image-to-image"

    def use(accelerator: VirtualAccelerator) -> dict[str, tuple[float, int, int, list[str]]]:
        warnings.simplefilter("ignore")
        seen = {}
        for variant in ("EulerDiscrete", "HeunDiscrete"):
            results, counts = [], []
            for device in ("", accelerator.name):
                first, second = make_pipe(base, full=True), make_pipe(refiner, full=True)
                first.scheduler = make_scheduler(variant, first.scheduler)
                second.scheduler = make_scheduler(variant, second.scheduler)
                if device:
                    first = anyaccel.place(first, device, dtype=torch.float32)
                    second = anyaccel.place(second, device, dtype=torch.float32)
                    accelerator.ledger.clear()
                counts.append([record_timesteps(first), record_timesteps(second)])
                latents = call(base, first, num_inference_steps=6, denoising_end=0.5)
                results.append(call(refiner, second, num_inference_steps=6, denoising_start=0.5, image=latents))
            problems = find_problems(accelerator)
            read = [[[float(timestep) for timestep in passes] for passes in pair] for pair in counts]
            assert read[0] == read[1], "the timesteps differ from the CPU"
            difference = float((results[1] - results[0]).abs().max())
            seen[variant] = difference, len(read[1][0]), len(read[1][1]), problems
        return seen

    for variant, (difference, before, after, problems) in run_forked("neuron", use, strict=True).items():
        assert problems == [], variant
        assert difference < TOLERANCE, variant
        assert before > 1, variant
        assert after > 1, variant


def record_timesteps(pipe: Any) -> list[Any]:
    """Return a list that receives the timestep of every pass; reading it synchronizes, so read it after the call."""
    passes: list[Any] = []

    def record(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        timestep = args[1] if len(args) > 1 else kwargs["timestep"]
        passes.append(timestep)

    pipe.unet.register_forward_pre_hook(record, with_kwargs=True)
    return passes


@pytest.mark.parametrize("device", ["neuron", pytest.param("mps", marks=pytest.mark.slow)])
def test_flow_matching_schedulers_match_the_cpu(device: str) -> None:
    """FLUX and Stable Diffusion 3, including image-to-image."""
    names = ("flux", "flux-image-to-image", "stable-diffusion-3", "stable-diffusion-3-image-to-image")

    def use(accelerator: VirtualAccelerator) -> dict[str, Outcome]:
        warnings.simplefilter("ignore")
        outcomes = {}
        for name in names:
            plain: Any = recipes()[name].make()
            placed = anyaccel.place(copy.deepcopy(plain), device, dtype=torch.float32)
            before = plain.scheduler
            variants = FLOW_MATCHING if name.startswith("stable") else FLOW_MATCHING[:1]
            for variant in variants:
                if variant == "FlowMatchHeunDiscrete" and name != "stable-diffusion-3":
                    continue
                plain.scheduler, placed.scheduler = make_scheduler(variant, before), make_scheduler(variant, before)
                outcomes[f"{name} {variant}"] = compare(accelerator, name, plain, placed, num_inference_steps=3)
            if name == "flux":
                plain.scheduler, placed.scheduler = copy.deepcopy(before), copy.deepcopy(before)
                custom = {"sigmas": [1.0, 0.6, 0.2], "num_inference_steps": 3}
                outcomes[f"{name} sigmas"] = compare(accelerator, name, plain, placed, **custom)
        return outcomes

    outcomes = run_forked(device, use, strict=True)
    assert len(outcomes) == 8
    for name, outcome in outcomes.items():
        assert outcome.problems == [], name
        assert outcome.difference < TOLERANCE, name
        assert outcome.left == [], name


def test_scheduler_is_unchanged_after_a_call(tmp_path: Path) -> None:
    """Checks class, methods and tables, copies, saved files and a user's own `step`."""

    def use(accelerator: VirtualAccelerator) -> None:
        warnings.simplefilter("ignore")
        pipe = anyaccel.place(make_pipe(IMAGE_TO_IMAGE), "neuron", dtype=torch.float32)
        pipe.scheduler = make_scheduler("DDIM", pipe.scheduler)
        scheduler, kind, names = pipe.scheduler, type(pipe.scheduler), set(vars(pipe.scheduler))
        config = dict(scheduler.config)
        first = call(IMAGE_TO_IMAGE, pipe)
        assert pipe.scheduler is scheduler
        assert type(scheduler) is kind
        assert set(vars(scheduler)) == names
        assert dict(scheduler.config) == config
        assert scheduler.alphas_cumprod.device.type == scheduler.timesteps.device.type == "cpu"
        copied = copy.deepcopy(scheduler)
        assert set(vars(copied)) == names
        assert copied.step.__self__ is copied
        pipe.scheduler = copied
        assert torch.equal(call(IMAGE_TO_IMAGE, pipe), first)
        pipe.scheduler.save_pretrained(tmp_path)
        load: Any = diffusers.DDIMScheduler.from_pretrained
        pipe.scheduler = load(tmp_path)
        assert torch.equal(call(IMAGE_TO_IMAGE, pipe), first)

        steps: list[float] = []
        plain_step = copied.step

        def step(model_output: Any, timestep: Any, sample: Any, *args: Any, **kwargs: Any) -> Any:
            steps.append(float(timestep))
            return plain_step(model_output, timestep, sample, *args, **kwargs)

        pipe.scheduler = copied
        copied.step = step
        assert torch.equal(call(IMAGE_TO_IMAGE, pipe), first)
        assert len(steps) == 2
        assert copied.step is step

    run_forked("neuron", use, strict=True)


def test_scheduler_is_unchanged_after_a_failed_call() -> None:
    def use(accelerator: VirtualAccelerator) -> None:
        warnings.simplefilter("ignore")
        pipe = anyaccel.place(make_pipe(TEXT_TO_IMAGE), "neuron", dtype=torch.float32)
        before = set(vars(pipe.scheduler))

        def fail(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
            raise KeyError("the user's own")

        with pytest.raises(KeyError, match="the user's own"):
            call(TEXT_TO_IMAGE, pipe, callback_on_step_end=fail)
        assert set(vars(pipe.scheduler)) - before <= {"_step_index", "num_inference_steps"}
        assert find_traces(pipe) == []
        assert call(TEXT_TO_IMAGE, pipe).isfinite().all()

    run_forked("neuron", use, strict=True)


def test_scheduler_with_tables_on_the_device_from_a_plain_call() -> None:
    def use(accelerator: VirtualAccelerator) -> tuple[float, list[str]]:
        warnings.simplefilter("ignore")
        plain = make_pipe(IMAGE_TO_IMAGE)
        plain.scheduler = make_scheduler("DDPM", plain.scheduler)
        expected = call(IMAGE_TO_IMAGE, plain)
        plain.to(accelerator.device())
        call(IMAGE_TO_IMAGE, plain)
        assert plain.scheduler.alphas_cumprod.device.type == accelerator.name
        placed = anyaccel.place(plain, accelerator.name, dtype=torch.float32)
        accelerator.ledger.clear()
        actual = call(IMAGE_TO_IMAGE, placed)
        return float((actual - expected).abs().max()), find_problems(accelerator)

    difference, problems = run_forked("mps", use)
    assert problems == []
    assert difference < TOLERANCE


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_cpu_tensors_own_only_scheduler_tensors() -> None:
    make: Any = diffusers.EulerDiscreteScheduler
    scheduler = make()
    with keep_on_cpu({"scheduler": scheduler, "again": scheduler, "unet": torch.nn.Linear(1, 1)}) as cpu_tensors:
        scheduler.set_timesteps(4, device="meta")
        assert scheduler.timesteps.device.type == "cpu"
        assert cpu_tensors.owns(scheduler.timesteps[1:])
        assert cpu_tensors.owns(scheduler.sigmas[2])
        assert not cpu_tensors.owns(torch.ones(4))
        assert not cpu_tensors.owns(torch.ones(4, device="meta"))
        inner = copy.deepcopy(scheduler)
        inner.set_timesteps(3, device="meta")
        assert len(inner.timesteps) == 3
        assert len(scheduler.timesteps) == 4
        with keep_on_cpu({"scheduler": scheduler}):
            scheduler.set_timesteps(2, device="meta")
        assert "step" in vars(scheduler), "the outer call still runs"
    assert "step" not in vars(scheduler)
    assert "set_timesteps" not in vars(scheduler)


def test_cpu_tensors_do_not_own_empty_tensors() -> None:
    cpu_tensors = CpuTensors()
    cpu_tensors.add(torch.ones(0))
    assert not cpu_tensors.owns(torch.ones(0, 3))
