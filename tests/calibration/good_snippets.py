"""Snippets that run correctly on hardware."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from anyaccel.recipes import recipes, run
from anyaccel.recipes.lazy_modules import diffusers
from tests.calibration.case import Snippet


def generate_with(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Snippet:
    """Return a snippet that runs a recipe's pipeline once on the device; options override the recipe's."""

    def generate(device: torch.device) -> None:
        recipe = recipes()[name]
        pipe: Any = recipe.make()
        pipe.to(device, dtype)
        if options:
            pipe(**recipe.call() | options)
        else:
            run(recipe, pipe)

    return generate


def generate_with_scheduler(scheduler: str, name: str) -> Snippet:
    """Return a snippet that runs a recipe's pipeline with another scheduler."""

    def generate(device: torch.device) -> None:
        recipe = recipes()[name]
        pipe: Any = recipe.make()
        pipe.scheduler = getattr(diffusers, scheduler).from_config(pipe.scheduler.config)
        run(recipe, pipe.to(device))

    return generate


def offload_sdxl(device: torch.device) -> None:
    """Run SDXL with model offloading."""
    recipe = recipes()["stable-diffusion-xl"]
    pipe: Any = recipe.make()
    pipe.enable_model_cpu_offload(device=device)
    run(recipe, pipe)


def move_cpu_noise(device: torch.device) -> None:
    """Draw noise with a CPU generator."""
    generator = torch.Generator().manual_seed(0)
    diffusers.utils.torch_utils.randn_tensor((1, 4, 8, 8), generator=generator, device=device, dtype=torch.bfloat16)
    torch.randn(1, 4, 8, 8, generator=generator).to(device)


def step_with_cpu_timesteps(device: torch.device) -> None:
    """Run a denoising loop that reads no values from the device until the end."""
    scheduler = diffusers.EulerDiscreteScheduler()
    scheduler.set_timesteps(4, device="cpu")
    scheduler.set_begin_index(0)
    sample = torch.ones(1, 4, 8, 8, device=device)
    for timestep in scheduler.timesteps:
        scaled = scheduler.scale_model_input(sample, timestep)
        sample = scheduler.step(scaled, timestep, sample).prev_sample
    sample.cpu()


def embed_tokens(device: torch.device) -> None:
    """Embed int64 token IDs, as tokenizers return them."""
    layer = torch.nn.Embedding(32, 8).to(device)
    layer(torch.tensor([[1, 5, 31]], dtype=torch.int64, device=device)).cpu()


def run_layer_in(dtype: torch.dtype) -> Snippet:
    """Return a snippet that runs a layer and a matrix product in one dtype."""

    def run_layer(device: torch.device) -> None:
        layer = torch.nn.Linear(8, 8).to(device, dtype)
        layer(torch.ones(2, 8, device=device, dtype=dtype)) @ torch.ones(8, 4, device=device, dtype=dtype)

    return run_layer


def attend_to_contiguous_inputs(device: torch.device) -> None:
    """Run attention on permuted inputs after `contiguous()`."""
    permuted = (torch.randn(84, 3, 3, 64).to(device).permute(0, 2, 1, 3) for _ in range(3))
    query, key, value = (tensor.contiguous() for tensor in permuted)
    functional.scaled_dot_product_attention(query, key, value).cpu()


def upsample_video(device: torch.device) -> None:
    """Run the upsampling of a video decoder."""
    torch.nn.ConvTranspose3d(4, 4, 3, stride=2).to(device)(torch.ones(1, 4, 3, 4, 4, device=device)).cpu()


def run_unet_layers(device: torch.device) -> None:
    """Run convolution, normalization and attention on noise from the CPU."""
    latents = diffusers.utils.torch_utils.randn_tensor(
        (1, 8, 8, 8), generator=torch.Generator().manual_seed(0), device=device
    )
    hidden = torch.nn.GroupNorm(2, 8).to(device)(torch.nn.Conv2d(8, 8, 3, padding=1).to(device)(latents))
    tokens = hidden.flatten(2).transpose(1, 2)[:, None]
    functional.scaled_dot_product_attention(tokens, tokens, tokens).cpu()


def rotate_in_float32(device: torch.device) -> None:
    """Compute rotary embeddings in float32."""
    position, dim = torch.arange(8, device=device), 16
    scale = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    angles = torch.einsum("n,d->nd", position.float(), 1.0 / 10000**scale)
    torch.stack([angles.cos(), angles.sin()], dim=-1).flatten(-2)


def rotate_in_real_numbers(device: torch.device) -> None:
    """Apply rotary embeddings with sine and cosine."""
    cos, sin = torch.ones(8, 1, 8, device=device).cos(), torch.ones(8, 1, 8, device=device).sin()
    query = torch.ones(8, 2, 16, device=device)
    even, odd = query[..., 0::2], query[..., 1::2]
    torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2).cpu()


def rotate_in_complex64(device: torch.device) -> None:
    """Apply rotary embeddings as complex products, without indexing the table."""
    rotations = torch.polar(torch.ones(8, 8), torch.ones(8, 8)).to(device)
    pairs = torch.view_as_complex(torch.ones(8, 2, 8, 2, device=device))
    torch.view_as_real(pairs * rotations.unsqueeze(1)).flatten(2).cpu()


def fill_position_ids_in_int32(device: torch.device) -> None:
    """Compute position IDs with the int32 cast that transformers applies on first-generation Gaudi."""
    mask = torch.tensor([[0, 0, 1, 1, 1]], device=device)
    position_ids = (mask.long().cumsum(-1) - 1).to(torch.int32)
    position_ids.masked_fill_(mask == 0, 1)


def store_layers_in_fp8(device: torch.device) -> None:
    """Store weights in fp8 and cast them per layer."""
    pipe: Any = recipes()["stable-diffusion"].make()
    unet = pipe.unet.to(device)
    unet.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    context = torch.ones(1, 4, unet.config.cross_attention_dim, device=device)
    with torch.no_grad():
        unet(torch.ones(1, 4, 8, 8, device=device), torch.tensor(1, device=device), context)


def scale_gradients(device: torch.device) -> None:
    """Run a GradScaler step with preset gradients, which are unscaled in float64."""
    model = torch.nn.Linear(4, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device.type)
    scaler.scale(torch.ones(1, device=device))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    scaler.step(optimizer)
    scaler.update()


def train_one_step(device: torch.device) -> None:
    """Run one training step."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.SiLU(), torch.nn.Linear(8, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss: Any = functional.mse_loss(model(torch.ones(2, 4, device=device)), torch.zeros(2, 4, device=device))
    loss.backward()
    optimizer.step()
