"""Failures in schedulers: NumPy dtypes, mixed devices, timestep lookups, random draws."""

from __future__ import annotations

import numpy
import torch

from anyaccel.recipes.lazy_modules import diffusers
from tests.calibration.case import Case

_DIFFUSERS = "https://github.com/huggingface/diffusers/"
_NEURON = _DIFFUSERS + "pull/13289"


def _set_helios_timesteps(device: torch.device) -> None:
    diffusers.HeliosScheduler().set_timesteps(4, stage_index=0, device=device)


def _step_helios_dmd(device: torch.device) -> None:
    scheduler = diffusers.HeliosDMDScheduler()
    latents = torch.zeros(1, 4, 1, 4, 4, device=device)
    schedule = torch.linspace(1, 0, 5)
    scheduler.convert_flow_pred_to_x0(latents, latents, torch.full((1,), 0.5, device=device), schedule, schedule)


def _pass_float64_timestep_to_unet(device: torch.device) -> None:
    sample = torch.zeros(1, 4, 8, 8, device=device)
    timesteps = torch.from_numpy(numpy.linspace(0, 999, 5))
    timesteps[0][None].to(sample.device)


def _set_karras_timesteps(device: torch.device) -> None:
    sigmas = numpy.linspace(14.6, 0.03, 5) ** (1 / 7)
    timesteps = numpy.array([float(sigma) for sigma in sigmas])
    torch.from_numpy(sigmas.astype(numpy.float32)).to(device=device)
    torch.from_numpy(timesteps).to(device=device)


def _add_noise_by_device_indices(device: torch.device) -> None:
    scheduler = diffusers.DDIMScheduler()
    timesteps = torch.tensor([500], device=device)
    scheduler.alphas_cumprod[timesteps] ** 0.5


def _draw_with_cpu_generator(device: torch.device) -> None:
    torch.randperm(8, generator=torch.Generator(), device=device)


def _step_ipndm(device: torch.device) -> None:
    scheduler = diffusers.IPNDMScheduler()
    scheduler.set_timesteps(4, device=device)
    sample = torch.ones(1, 4, 8, 8, device=device)
    for timestep in scheduler.timesteps:
        sample = scheduler.step(sample * 0.1, timestep, sample).prev_sample


def _step_euler(device: torch.device) -> None:
    scheduler = diffusers.EulerDiscreteScheduler()
    scheduler.set_timesteps(4, device=device)
    sample = torch.ones(1, 4, 8, 8, device=device)
    sample = scheduler.scale_model_input(sample, scheduler.timesteps[0])
    scheduler.step(sample, scheduler.timesteps[0], sample)


def _step_flow_match(device: torch.device) -> None:
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(4, device=device)
    sample = torch.ones(1, 4, 8, 8, device=device)
    scheduler.step(sample, scheduler.timesteps[0], sample)


def _step_euler_ancestral(device: torch.device) -> None:
    scheduler = diffusers.EulerAncestralDiscreteScheduler()
    scheduler.set_timesteps(4, device="cpu")
    scheduler.set_begin_index(0)
    sample = torch.ones(1, 4, 8, 8, device=device)
    scheduler.step(sample, scheduler.timesteps[0], sample)


def _loop_over_device_timesteps(device: torch.device) -> None:
    scheduler = diffusers.EulerDiscreteScheduler()
    scheduler.set_timesteps(4, device=device)
    for timestep in scheduler.timesteps:
        int(timestep)


def _expand_in_unipc(device: torch.device) -> None:
    sigmas = torch.from_numpy(numpy.linspace(0.9, 0.1, 5)).to(device)
    torch.expm1(-torch.log(sigmas))


def _move_float64_schedule(device: torch.device) -> None:
    sigmas = numpy.linspace(1, 1 / 1000, 5)
    torch.from_numpy(sigmas).to(device=device)


CASES = (
    Case(
        name="mps-helios-timesteps",
        device="mps",
        effect="error",
        thread=_DIFFUSERS + "issues/14367",
        says="HeliosScheduler.set_timesteps raises a TypeError: its NumPy schedule is float64.",
        run=_set_helios_timesteps,
        strict_error="TypeError",
        site="diffusers/schedulers/scheduling_helios.py",
        limit="float64",
    ),
    Case(
        name="mps-helios-dmd-step",
        device="mps",
        effect="error",
        thread=_DIFFUSERS + "pull/14071",
        says="convert_flow_pred_to_x0 calls .double(): Cannot convert a MPS Tensor to float64 dtype.",
        run=_step_helios_dmd,
        strict_error="TypeError",
        site="diffusers/schedulers/scheduling_helios_dmd.py",
        limit="float64",
    ),
    Case(
        name="mps-lms-timestep",
        device="mps",
        effect="error",
        thread=_DIFFUSERS + "issues/358",
        says="LMSDiscreteScheduler's timestep is float64, and timesteps[None].to(sample.device) raises.",
        run=_pass_float64_timestep_to_unet,
        strict_error="TypeError",
        limit="float64",
    ),
    Case(
        name="mps-euler-karras",
        device="mps",
        effect="error",
        thread="https://github.com/invoke-ai/InvokeAI/issues/4831",
        says="The Euler Karras scheduler raises a TypeError on float64.",
        run=_set_karras_timesteps,
        strict_error="TypeError",
        limit="float64",
    ),
    Case(
        name="mps-indices-of-another-device",
        device="mps",
        effect="error",
        thread=_DIFFUSERS + "issues/239",
        says="add_noise: indices should be either on cpu or on the same device as the indexed tensor (cpu).",
        run=_add_noise_by_device_indices,
        strict_error="RuntimeError",
    ),
    Case(
        name="mps-cpu-generator",
        device="mps",
        effect="error",
        thread="https://github.com/huggingface/transformers/issues/31897",
        says="Expected a 'mps:0' generator device but found 'cpu', in the randperm of a sampler.",
        run=_draw_with_cpu_generator,
        strict_error="RuntimeError",
    ),
    Case(
        name="mps-ipndm-nan",
        device="mps",
        effect="wrong",
        thread=_DIFFUSERS + "issues/14368",
        says="IPNDMScheduler returns only NaN: a tensor times a CPU scalar with a storage offset is wrong.",
        run=_step_ipndm,
        site="diffusers/schedulers/scheduling_ipndm.py",
    ),
    Case(
        name="neuron-timestep-look-up",
        device="neuron",
        effect="error",
        thread=_NEURON,
        says="The scheduler's timestep lookup has a data-dependent shape; SDXL needed set_begin_index(0).",
        run=_step_euler,
        site="diffusers/schedulers/scheduling_euler_discrete.py",
        limit="data_dependent_shapes",
    ),
    Case(
        name="neuron-timesteps-read-back",
        device="neuron",
        effect="slow",
        thread=_DIFFUSERS + "pull/13718",
        says="SDXL and PixArt keep their timesteps on the CPU to avoid one round trip per step.",
        run=_loop_over_device_timesteps,
        limit="host_round_trip",
    ),
    Case(
        name="hpu-timestep-look-up",
        device="hpu",
        effect="slow",
        thread="https://github.com/HabanaAI/gaudi-pytorch-bridge/blob/47ac7d08773ddccb40511b0070621233c8d845c2/"
        "pytorch_helpers/habana_helpers/frontend_utils.cpp",
        says="item(), as in a timestep lookup, copies synchronously and spins until the copy is done.",
        run=_step_flow_match,
        site="diffusers/schedulers/scheduling_flow_match_euler_discrete.py",
        limit="host_round_trip",
    ),
    Case(
        name="hpu-ancestral-noise",
        device="hpu",
        effect="wrong",
        thread="https://github.com/huggingface/optimum-habana/blob/2c4d83fcb817d20e895f3e5b23438ebced330272/"
        "optimum/habana/diffusers/schedulers/scheduling_euler_ancestral_discrete.py",
        says="torch.randn is broken on HPU so running it on CPU.",
        run=_step_euler_ancestral,
        site="diffusers/utils/torch_utils.py",
        limit="random_numbers",
    ),
    Case(
        name="npu-helios-unipc",
        device="npu",
        effect="error",
        thread="https://github.com/sgl-project/sglang/pull/29011",
        says="expm1 in the scheduler of Helios: Tensor self not implemented for DT_DOUBLE.",
        run=_expand_in_unipc,
        limit="float64",
    ),
    Case(
        name="hpu-float64-schedule",
        device="hpu",
        effect="narrowed",
        thread="https://github.com/HabanaAI/gaudi-pytorch-bridge/blob/f90046f4e6efe15d0e7ba218c974a816cc038c71/"
        "backend/helpers/tensor_utils.cpp",
        says="A float64 tensor is stored as float32, while torch still reports float64.",
        run=_move_float64_schedule,
        limit="float64",
    ),
    Case(
        name="mlu-float64-schedule",
        device="mlu",
        effect="narrowed",
        thread="https://github.com/open-mmlab/mmcv/pull/1429",
        says="MLU does not support 64-bit floating point: torch_mlu stores it as float32.",
        run=_move_float64_schedule,
        limit="float64",
    ),
)
