"""Previews: estimates of the clean latents from one model output and the scheduler's coefficients."""

from typing import Any

import diffusers
import numpy
import pytest
import torch

from anyaccel.recipes import recipes
from anyaccel.runtime.pipeline import place
from anyaccel.server.batching.pipeline_copy import light_copy
from anyaccel.server.worker.denoise_progress import StepObserver, estimate_clean, observing_steps

SCHEDULERS: list[tuple[str, dict[str, Any]]] = [
    ("DDIMScheduler", {}),
    ("DDIMScheduler", {"prediction_type": "v_prediction"}),
    ("DDPMScheduler", {}),
    ("PNDMScheduler", {"skip_prk_steps": True}),
    ("LCMScheduler", {}),
    ("EulerDiscreteScheduler", {}),
    ("EulerDiscreteScheduler", {"prediction_type": "v_prediction"}),
    ("EulerAncestralDiscreteScheduler", {}),
    ("HeunDiscreteScheduler", {}),
    ("DPMSolverMultistepScheduler", {}),
    ("DPMSolverMultistepScheduler", {"prediction_type": "v_prediction"}),
    ("UniPCMultistepScheduler", {}),
    ("DEISMultistepScheduler", {}),
    ("FlowMatchEulerDiscreteScheduler", {}),
    ("FlowMatchHeunDiscreteScheduler", {}),
]


@pytest.mark.parametrize(("name", "config"), SCHEDULERS, ids=[f"{name} {config}" for name, config in SCHEDULERS])
def test_a_perfect_model_output_gives_the_clean_latents(name: str, config: dict[str, Any]) -> None:
    scheduler = getattr(diffusers, name)(**config)
    scheduler.set_timesteps(10)
    generator = torch.Generator().manual_seed(0)
    clean, noise = (torch.randn(1, 4, 8, 8, generator=generator) for _ in range(2))
    timestep = scheduler.timesteps[3]
    if "FlowMatch" in name:
        sigma = scheduler.sigmas[3]
        sample, output = (1 - sigma) * clean + sigma * noise, noise - clean
    else:
        sample = scheduler.add_noise(clean, noise, timestep[None])
        output = noise
        if config.get("prediction_type") == "v_prediction":
            alpha_cumprod = scheduler.alphas_cumprod[int(timestep)]
            output = alpha_cumprod.sqrt() * noise - (1 - alpha_cumprod).sqrt() * clean
    estimated = estimate_clean(scheduler, output, timestep, sample)
    assert estimated is not None
    assert (estimated - clean).abs().max() < 2e-2


@pytest.mark.parametrize(
    "name", ["stable-diffusion", "stable-diffusion-xl", "stable-diffusion-3", "flux", "pixart-alpha", "ddpm"]
)
def test_the_last_preview_equals_the_image(name: str) -> None:
    pipe = place(recipes()[name].make(), "cpu", dtype="float32")
    pipe.set_progress_bar_config(disable=True)
    call = {**recipes()[name].call(), "num_inference_steps": 5, "output_type": "np"}
    call.pop("generator", None)
    previews: list[Any] = []
    steps: list[tuple[int, int]] = []
    pipe_copy = light_copy(pipe)
    expected = numpy.asarray(pipe(**call, seed=3).images)[0]
    height, width = expected.shape[:2]
    observer = StepObserver(lambda done, total: steps.append((done, total)), previews.append, (0.4, 1.0))
    with observing_steps(pipe_copy, observer, (width, height)):
        image = numpy.asarray(pipe_copy(**call, seed=3).images)[0]
    assert numpy.abs(image - expected).max() < 1e-5, "observing does not change the image"
    assert steps[-1][0] == steps[-1][1]
    assert len(previews) == 2
    last = numpy.asarray(previews[-1].convert("RGB" if expected.shape[2] == 3 else "L")).reshape(expected.shape) / 255
    assert numpy.abs(last - expected).mean() < 0.03
