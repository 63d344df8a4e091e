"""Usages that replace or patch the scheduler."""

from __future__ import annotations

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


@usage(GROUP)
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
