"""Placed pipelines on real accelerators: images match the CPU, seeds, and one test per mechanism."""

import os
from typing import Any

import numpy
import pytest
import torch

import anyaccel
from anyaccel.recipes import recipes, run
from tests.conftest import NEEDS_RECIPES

pytestmark = [pytest.mark.hardware, NEEDS_RECIPES]

PRESENT = [device.name for device in anyaccel.devices() if device.available and device.name != "cpu"]
TOLERANCES = {"float32": 5e-3, "bfloat16": 1e-1, "float16": 5e-2}
"""Tolerance by dtype, for pixel values from 0 to 1. Matrix units also round float32; random weights amplify errors."""
NAMES = ["stable-diffusion", "stable-diffusion-xl", "flux", "pixart-alpha", "flux-2-klein", "stable-diffusion-3"]
CALL: dict[str, Any] = {"num_inference_steps": 3, "height": 16, "width": 16, "output_type": "np"}


@pytest.fixture(params=PRESENT or ["none"])
def device(request: pytest.FixtureRequest) -> Any:
    if not PRESENT:
        pytest.skip("no accelerator available; `anyaccel devices` shows the reason")
    before = dict(os.environ)
    yield request.param
    os.environ.clear()
    os.environ.update(before)


def make(name: str, device: str, dtype: str = "float32") -> Any:
    pipe = anyaccel.place(recipes()[name].make(), device, dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.parametrize("name", NAMES)
def test_a_placed_pipeline_generates_the_image_of_the_cpu(device: str, name: str) -> None:
    recipe = recipes()[name]
    expected = run(recipe, recipe.make())
    for dtype in ("float32", "bfloat16"):
        pipe = make(name, device, dtype)
        assert not pipe.plan.virtual
        actual = run(recipe, pipe)
        assert numpy.abs(expected - actual).mean() < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_seed_determines_the_initial_latents(device: str, dtype: str) -> None:
    """The latents of the first step are bitwise equal, for one image and in a batch."""
    latents = []
    for target, target_dtype in (("cpu", "float32"), (device, dtype)):
        seen: list[torch.Tensor] = []
        firsts = []
        pipe = make("stable-diffusion", target, target_dtype)
        pipe.unet.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[0].detach().cpu()))
        for images in (1, 3):
            seen.clear()
            pipe(["a"] * images, seed=list(range(5, 5 + images)), guidance_scale=1.0, **CALL)
            firsts.append(seen[0])
        latents.append(firsts)
    for reference, other in zip(*latents, strict=True):
        assert torch.equal(reference.to(getattr(torch, dtype)), other)
    assert torch.equal(latents[1][0], latents[1][1][:1])


def test_an_image_of_a_batch_equals_the_single_image(device: str) -> None:
    pipe = make("stable-diffusion", device)
    batched = pipe("a fox", seed=7, num_images_per_prompt=3, **CALL).images
    single = [pipe("a fox", seed=7 + image, **CALL).images[0] for image in range(3)]
    assert numpy.abs(batched - numpy.stack(single)).max() < TOLERANCES["float32"]


def test_sliced_attention_equals_attention(device: str) -> None:
    pipe = make("stable-diffusion", device)
    whole = pipe("a fox", seed=1, **CALL).images
    pipe.enable_attention_slicing("max")
    assert numpy.abs(whole - pipe("a fox", seed=1, **CALL).images).max() < TOLERANCES["float32"]


@pytest.mark.parametrize("method", ["enable_model_cpu_offload", "enable_sequential_cpu_offload"])
def test_offloading(device: str, method: str) -> None:
    recipe = recipes()["stable-diffusion"]
    expected = run(recipe, recipe.make())
    pipe = make("stable-diffusion", "cpu")
    getattr(pipe, method)(device=device)
    for _ in range(2):
        assert numpy.abs(expected - run(recipe, pipe)).max() < TOLERANCES["float32"]


def test_an_image_that_is_not_finite_is_traced_and_recomputed(device: str) -> None:
    pipe = make("stable-diffusion", device, "float16")
    with torch.no_grad():
        pipe.vae.decoder.conv_in.weight.mul_(1e5)
        pipe.vae.decoder.conv_in.bias.mul_(1e5)
    assert numpy.isfinite(pipe("a fox", seed=1, **CALL).images).all()
    assert pipe.plan.report.float32_models.value == ("vae",)
    with torch.no_grad():
        pipe.unet.conv_in.weight.fill_(float("nan"))
    with pytest.raises(anyaccel.AnyaccelError, match=r"unet\.conv_in at forward pass 1"):
        pipe("a fox", seed=1, **CALL)


def test_a_compiled_pipeline_generates_the_same_image(device: str) -> None:
    pipe = make("stable-diffusion", device)
    eager = pipe("a fox", seed=1, **CALL).images
    before = dict(os.environ)
    pipe.enable_compile()
    pipe.warmup([(16, 16)])
    assert numpy.abs(eager - pipe("a fox", seed=1, **CALL).images).max() < TOLERANCES["float32"]
    assert dict(os.environ) == before
