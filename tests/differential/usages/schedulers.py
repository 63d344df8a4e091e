"""Usages that replace or patch the scheduler."""

from __future__ import annotations

import copy
import functools
from typing import Any

import diffusers
import torch

from tests.differential.session import Session, twice, usage

GROUP = "schedulers"


def change_scheduler(kind: str) -> Any:
    """Return a usage that replaces the scheduler."""

    def run(session: Session) -> Any:
        def edit(pipe: Any) -> None:
            pipe.scheduler = getattr(diffusers, kind).from_config(pipe.scheduler.config)

        return twice(session, edit)

    run.__name__ = f"scheduler_replaced_by_{kind}"
    run.__doc__ = f"`pipe.scheduler = {kind}.from_config(…)` between calls."
    return run


for scheduler in (
    "DDIMScheduler", "DDPMScheduler", "EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler",
    "DPMSolverMultistepScheduler", "DPMSolverSinglestepScheduler", "UniPCMultistepScheduler",
    "HeunDiscreteScheduler", "KDPM2DiscreteScheduler", "KDPM2AncestralDiscreteScheduler", "DEISMultistepScheduler",
    "LCMScheduler", "PNDMScheduler", "TCDScheduler", "SASolverScheduler",
):  # fmt: skip
    usage(GROUP)(change_scheduler(scheduler))


@usage(GROUP)
def scheduler_config_changed(session: Session) -> Any:
    """`from_config` with other options."""

    def edit(pipe: Any) -> None:
        pipe.scheduler = diffusers.DPMSolverMultistepScheduler.from_config(
            pipe.scheduler.config, use_karras_sigmas=True, algorithm_type="sde-dpmsolver++"
        )

    return twice(session, edit)


@usage(GROUP, skip={"served": "each request has a copy of the scheduler; the patch calls the original one"})
def scheduler_step_patched(session: Session) -> Any:
    """A function assigned to `scheduler.step`."""

    def edit(pipe: Any) -> None:
        original = pipe.scheduler.step

        def step(model_output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return original(model_output * 0.9, *args, **kwargs)

        pipe.scheduler.step = step

    return twice(session, edit)


@usage(GROUP)
def scheduler_class_patched(session: Session) -> Any:
    """`step` patched on the scheduler's class."""
    kind = diffusers.PNDMScheduler
    original = kind.step
    try:

        def edit(pipe: Any) -> None:
            @functools.wraps(original)
            def step(self: Any, model_output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                return original(self, model_output * 0.9, *args, **kwargs)

            kind.step = step

        return twice(session, edit)
    finally:
        kind.step = original


@usage(GROUP)
def scheduler_of_the_user(session: Session) -> Any:
    """A scheduler class of the user, derived from `EulerDiscreteScheduler`."""

    class Damped(diffusers.EulerDiscreteScheduler):
        def step(self, model_output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return super().step(model_output * 0.95, *args, **kwargs)

    return twice(session, lambda pipe: setattr(pipe, "scheduler", Damped.from_config(pipe.scheduler.config)))


@usage(GROUP, skip={"served": "each request has its own copy of the scheduler"})
def scheduler_shared_by_two_pipelines(session: Session) -> Any:
    """One scheduler object in two pipelines, called in turn."""
    first, second = session.make(), session.make()
    second.scheduler = first.scheduler
    return {
        "a": session.run(first, num_inference_steps=3),
        "b": session.run(second, num_inference_steps=5),
        "c": session.run(first, num_inference_steps=4),
        "steps": len(first.scheduler.timesteps),
    }


@usage(GROUP, skip={"served": "each request has its own copy of the scheduler"})
def timesteps_of_the_user(session: Session) -> Any:
    """`timesteps=` with a scheduler that accepts them."""
    pipe = session.make()
    pipe.scheduler = diffusers.DDPMScheduler.from_config(pipe.scheduler.config)
    result = session.run(pipe, timesteps=[999, 600, 200], num_inference_steps=None)
    return {"result": result, "timesteps": torch.as_tensor(pipe.scheduler.timesteps).cpu()}


@usage(GROUP)
def sigmas_of_the_user(session: Session) -> Any:
    """`sigmas=` for a flow-matching scheduler."""
    return session.run(session.make("flux"), "flux", sigmas=[1.0, 0.6, 0.2], num_inference_steps=3)


@usage(GROUP)
def flow_matching_with_shift(session: Session) -> Any:
    """`FlowMatchEulerDiscreteScheduler.from_config(…, shift=…)` with dynamic shifting off."""
    pipe = session.make("stable-diffusion-3")
    first = session.run(pipe, "stable-diffusion-3")
    pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_config(pipe.scheduler.config, shift=5.0)
    return {"before": first, "after": session.run(pipe, "stable-diffusion-3")}


@usage(GROUP)
def zero_terminal_snr(session: Session) -> Any:
    """`rescale_betas_zero_snr=True` and `timestep_spacing='trailing'` with `guidance_rescale`."""

    def edit(pipe: Any) -> None:
        pipe.scheduler = diffusers.DDIMScheduler.from_config(
            pipe.scheduler.config, rescale_betas_zero_snr=True, timestep_spacing="trailing"
        )

    return twice(session, edit, guidance_rescale=0.7)


@usage(GROUP, skip={"served": "each request has its own copy of the scheduler"})
def scheduler_inspected_after_a_call(session: Session) -> Any:
    """Timesteps, `sigmas` and the step index that a scheduler has after a call."""
    pipe = session.make()
    pipe.scheduler = diffusers.EulerDiscreteScheduler.from_config(pipe.scheduler.config)
    session.run(pipe, num_inference_steps=3)
    return {
        "timesteps": torch.as_tensor(pipe.scheduler.timesteps).float().cpu(),
        "sigmas": torch.as_tensor(pipe.scheduler.sigmas).cpu(),
        "index": pipe.scheduler.step_index,
    }


def look_ahead(kind: str) -> Any:
    """Return a usage in which a callback steps with a shallow copy of the scheduler."""

    def run(session: Session) -> Any:
        def callback(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
            if step == 0:
                latents, scheduler = values["latents"], copy.copy(pipe.scheduler)
                ahead.append(scheduler.step(latents * 0.1, scheduler.timesteps[1], latents, **noise)[0].cpu())
            return {}

        ahead: list[Any] = []
        # Without a generator, diffusers would draw on the device.
        noise = {"generator": torch.Generator().manual_seed(3)} if kind == "LCMScheduler" else {}
        pipe = session.make()
        pipe.scheduler = getattr(diffusers, kind).from_config(pipe.scheduler.config)
        result = session.run(pipe, num_inference_steps=4, callback_on_step_end=callback)
        return {"image": result, "ahead": ahead[0]}

    run.__name__ = f"callback_copies_{kind}"
    run.__doc__ = f"A callback that calls `copy.copy(pipe.scheduler).step` with a {kind}."
    return run


for scheduler in ("LCMScheduler", "UniPCMultistepScheduler", "EulerDiscreteScheduler"):
    usage(GROUP)(look_ahead(scheduler))
