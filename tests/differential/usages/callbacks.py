"""Usages that change a pipeline during a call."""

from __future__ import annotations

import contextlib
from typing import Any

import diffusers
import torch

from tests.differential.session import CPU_NOISE, Session, usage

GROUP = "callbacks"


@usage(GROUP)
def callback_changes_latents(session: Session) -> Any:
    """`callback_on_step_end` that returns changed latents."""

    def callback(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        return {"latents": values["latents"] * 0.9}

    return session.run(session.make(), callback_on_step_end=callback)


@usage(GROUP)
def callback_changes_embeddings(session: Session) -> Any:
    """`callback_on_step_end` that changes the prompt embeddings."""

    def callback(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        return {"prompt_embeds": values["prompt_embeds"] * 0.5}

    names = ["latents", "prompt_embeds"]
    return session.run(
        session.make(), callback_on_step_end=callback, callback_on_step_end_tensor_inputs=names, num_inference_steps=3
    )


@usage(GROUP)
def callback_changes_guidance(session: Session) -> Any:
    """A callback that sets `pipe._guidance_scale` to 0 after a step."""

    def callback(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        if step == 1:
            pipe._guidance_scale = 0.0
            return {"prompt_embeds": values["prompt_embeds"].chunk(2)[-1]}
        return {}

    return session.run(
        session.make(), callback_on_step_end=callback, callback_on_step_end_tensor_inputs=["prompt_embeds"],
        num_inference_steps=4,
    )  # fmt: skip


@usage(GROUP)
def callback_interrupts(session: Session) -> Any:
    """A callback that sets `pipe._interrupt`."""

    def callback(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        pipe._interrupt = step >= 1
        return {}

    pipe = session.make()
    stopped = session.run(pipe, callback_on_step_end=callback, num_inference_steps=6)
    return {"stopped": stopped, "next": session.run(pipe)}


@usage(GROUP)
def callback_edits_weights(session: Session) -> Any:
    """A callback that edits weights by `.data`."""

    def callback(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        pipe.unet.conv_in.weight.data.mul_(1.1)
        return {}

    return session.run(session.make(), callback_on_step_end=callback, num_inference_steps=3)


@usage(GROUP)
def callback_raises(session: Session) -> Any:
    """A callback that raises; the next call works."""

    def callback(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        raise KeyError("stop")

    pipe = session.make()
    error = ""
    try:
        session.run(pipe, callback_on_step_end=callback)
    except KeyError as raised:
        error = str(raised)
    return {"error": error, "next": session.run(pipe)}


@usage(GROUP)
def callback_counts_steps(session: Session) -> Any:
    """A callback that records steps and timesteps."""
    steps: list[int] = []

    def callback(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        steps.extend([step, int(timestep)])
        return {}

    result = session.run(session.make(), callback_on_step_end=callback, num_inference_steps=4)
    return {"result": result, "steps": tuple(steps)}


@usage(GROUP)
def callback_draws_random_numbers(session: Session) -> Any:
    """A callback that draws from the global generator."""

    def callback(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        latents = values["latents"]
        return {"latents": latents + 0.01 * torch.randn(latents.shape).to(latents)}

    return session.run(session.make(), callback_on_step_end=callback)


@usage(GROUP, skip=CPU_NOISE)
def callback_uses_dropout(session: Session) -> Any:
    """A callback with `dropout` and `gumbel_softmax`, which torch implements in Python."""

    def callback(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        latents = torch.nn.functional.dropout(values["latents"], 0.1)
        return {"latents": latents + torch.nn.functional.gumbel_softmax(latents, dim=1)}

    return session.run(session.make(), callback_on_step_end=callback)


@usage(GROUP)
def callback_edits_a_copy_of_the_sigmas(session: Session) -> Any:
    """A callback that changes a copy of a tensor of the scheduler in place."""
    pipe = session.make()
    pipe.scheduler = diffusers.EulerDiscreteScheduler.from_config(pipe.scheduler.config)

    def callback(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        latents = values["latents"]
        sigmas = pipe.scheduler.sigmas.to(latents.device, copy=True).mul_(0.5)
        return {"latents": latents * (1 + 0.01 * sigmas[step])}

    return session.run(pipe, callback_on_step_end=callback, num_inference_steps=4)


@usage(GROUP)
def callback_moves_a_ramp_to_the_device(session: Session) -> Any:
    """A callback that creates a tensor with `torch.linspace` on the CPU and moves it to the device."""
    devices: list[bool] = []

    def callback(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        latents = values["latents"]
        ramp = torch.linspace(0.9, 1, latents.shape[-1]).to(latents.device)
        devices.append(ramp.device == latents.device)
        return {"latents": latents * ramp}

    return {"result": session.run(session.make(), callback_on_step_end=callback), "devices": devices}


@usage(GROUP)
def callback_uses_integer_indices(session: Session) -> Any:
    """A callback with functions that accept only int64 indices."""

    def callback(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        latents = values["latents"]
        rows = torch.arange(latents.shape[2], device=latents.device).flip(0)
        flipped = torch.index_copy(latents, 2, rows, latents)
        halves = flipped.tensor_split(rows[-2:-1].cpu(), dim=3)
        return {"latents": torch.cat(halves[::-1], dim=3)}

    return session.run(session.make(), callback_on_step_end=callback)


@usage(GROUP)
def legacy_callback(session: Session) -> Any:
    """The deprecated `callback` and `callback_steps` arguments."""
    steps: list[int] = []
    result = session.run(session.make(), callback=lambda step, timestep, latents: steps.append(step), callback_steps=1)
    return {"result": result, "steps": tuple(steps)}


@usage(GROUP)
def hook_on_first_layer_edits_input_in_place(session: Session) -> Any:
    """A pre-hook that edits its input in place."""
    pipe = session.make()
    pipe.unet.conv_in.register_forward_pre_hook(lambda module, args: (args[0].mul_(0.9),))
    return session.run(pipe)


@usage(GROUP)
def callback_computes_a_gradient(session: Session) -> Any:
    """A callback that moves the latents along a gradient, as in universal guidance."""

    def callback(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        with torch.enable_grad():
            latents = values["latents"].detach().requires_grad_()
            loss = pipe.vae.decode(latents).sample.pow(2).mean()
            (gradient,) = torch.autograd.grad(loss, latents)
        return {"latents": (latents - 0.1 * gradient).detach()}

    return session.run(session.make(), callback_on_step_end=callback)


@usage(GROUP)
def callback_decodes_previews(session: Session) -> Any:
    """A callback that decodes the latents of each step."""
    previews = []

    def callback(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        with torch.no_grad():
            previews.append(pipe.vae.decode(values["latents"] / pipe.vae.config.scaling_factor).sample.cpu())
        return {}

    result = session.run(session.make(), callback_on_step_end=callback)
    return {"result": result, "previews": torch.stack(previews)}


@usage(GROUP)
def callback_class(session: Session) -> Any:
    """`SDCFGCutoffCallback` of diffusers."""
    return session.run(
        session.make(), num_inference_steps=5,
        callback_on_step_end=diffusers.callbacks.SDCFGCutoffCallback(cutoff_step_ratio=0.4),
    )  # fmt: skip


@usage(GROUP)
def callback_keeps_latents(session: Session) -> Any:
    """A callback that keeps the latents of each step; later steps do not change them."""
    kept = []

    def callback(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        kept.append(values["latents"])
        return {}

    session.run(session.make(), callback_on_step_end=callback, num_inference_steps=4)
    return torch.stack([latents.cpu() for latents in kept])


@usage(GROUP)
def callback_stops_with_an_exception(session: Session) -> Any:
    """A callback that ends the call with an exception of the user."""

    class StoppedError(Exception):
        pass

    kept: list[torch.Tensor] = []

    def callback(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        kept.append(values["latents"].cpu())
        if step == 1:
            raise StoppedError
        return {}

    pipe = session.make()
    with contextlib.suppress(StoppedError):
        session.run(pipe, callback_on_step_end=callback, num_inference_steps=5)
    return {"kept": torch.stack(kept), "next": session.run(pipe)}


@usage(GROUP, skip={"served": "the default device applies to one thread"})
def callback_sets_the_default_device(session: Session) -> Any:
    """A callback that calls `torch.set_default_device`; it stays in effect after the call."""

    def callback(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        torch.set_default_device("meta" if step == 1 else None)
        return {}

    pipe = session.make()
    try:
        session.run(pipe, callback_on_step_end=callback, output_type="latent")
        devices = [str(torch.get_default_device()), str(torch.zeros(1).device)]
    finally:
        torch.set_default_device(None)
    return {"devices": devices, "after": session.run(pipe)}
