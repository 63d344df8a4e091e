"""What users and models did, where it failed on more than one device; each is a few lines of the thread's own."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from anyaccel.recipes import recipes
from anyaccel.recipes.lazy_modules import diffusers


def turn_by_float64(device: torch.device) -> None:
    """Rotary embeddings of FLUX before diffusers cast them: their angles are float64."""
    rotate = diffusers.models.embeddings.get_1d_rotary_pos_embed
    rotate(16, torch.arange(8, device=device), use_real=True, freqs_dtype=torch.float64)


def turn_by_float64_in_rope(device: torch.device) -> None:
    """Rotary embeddings of PRX and ERNIE-Image."""
    position, dim = torch.arange(8, device=device), 16
    scale = torch.arange(0, dim, 2, dtype=torch.float64, device=position.device) / dim
    torch.einsum("n,d->nd", position, 1.0 / 10000**scale)


def turn_by_linspace_in_float64(device: torch.device) -> None:
    """Rotary embeddings of FLUX in ComfyUI."""
    position, dim = torch.zeros(1, 8, device=device), 16
    scale = torch.linspace(0, (dim - 2) / dim, steps=dim // 2, dtype=torch.float64, device=device)
    torch.einsum("...n,d->...nd", position.to(torch.float32), 1.0 / (10000**scale))


def turn_wan_in_complex128(device: torch.device) -> None:
    """Rotary embeddings of Wan as its authors wrote them."""
    angles = torch.outer(torch.arange(8), 1.0 / 10000 ** torch.arange(0, 16, 2).to(torch.float64).div(16))
    turns = torch.polar(torch.ones_like(angles), angles).to(device)
    query = torch.ones(8, 2, 16, device=device)
    pairs = torch.view_as_complex(query.to(torch.float64).reshape(8, 2, -1, 2))
    torch.view_as_real(pairs * turns.unsqueeze(1)).flatten(2).float()


def turn_in_complex64(device: torch.device) -> None:
    """Rotary embeddings in complex numbers."""
    angles = torch.ones(8, 8, device=device)
    turns = torch.polar(torch.ones_like(angles), angles)
    pairs = torch.view_as_complex(torch.ones(8, 2, 8, 2, device=device))
    torch.view_as_real(pairs * turns.unsqueeze(1)).flatten(2)


def pick_complex64_turns(device: torch.device) -> None:
    """Positions picked from a complex table."""
    turns = torch.polar(torch.ones(16, 8), torch.ones(16, 8)).to(device)
    turns[torch.arange(4, device=device)]


def gather_complex128_turns(device: torch.device) -> None:
    """Positions gathered from a complex table."""
    turns = torch.polar(torch.ones(16, 8, dtype=torch.float64), torch.ones(16, 8, dtype=torch.float64)).to(device)
    torch.gather(turns, 0, torch.zeros(4, 8, dtype=torch.int64, device=device))


def draw_with_z_image(device: torch.device) -> None:
    """Z-Image as diffusers has it, with complex rotary embeddings."""
    recipe = recipes()["z-image"]
    pipe: Any = recipe.make()
    pipe.to(device)(**recipe.call())


def hand_float_timestep_to_unet(device: torch.device) -> None:
    """A timestep as a number of Python, made a tensor."""
    timestep, sample = 981.0, torch.zeros(1, 4, 8, 8, device=device)
    dtype = torch.float64 if isinstance(timestep, float) else torch.int64
    torch.tensor([timestep], dtype=dtype, device=sample.device).expand(sample.shape[0])


def hand_int64_timestep_to_unet(device: torch.device) -> None:
    """A timestep as a whole number."""
    torch.tensor([981], dtype=torch.int64, device=device).expand(2)


def draw_latents_there(device: torch.device) -> None:
    """Noise drawn on the device."""
    torch.randn(1, 4, 8, 8, device=device)


def seed_a_generator_there(device: torch.device) -> None:
    """A generator of the device."""
    torch.Generator(device=device).manual_seed(0)


def pick_by_a_mask(device: torch.device) -> None:
    """A result whose length depends on a mask."""
    hidden = torch.ones(8, 4, device=device)
    hidden[torch.arange(8, device=device) < 5]


def repeat_by_a_tensor(device: torch.device) -> None:
    """Repetitions whose counts are on the device."""
    lengths = torch.tensor([2, 1, 3], device=device)
    torch.repeat_interleave(torch.arange(3, device=device), lengths)


def load_weights_in_fp8(device: torch.device) -> None:
    """Weights kept in fp8."""
    torch.nn.Linear(8, 8).to(torch.float8_e4m3fn).to(device)


def load_sdxl(device: torch.device) -> None:
    """All parts of SDXL at once."""
    pipe: Any = recipes()["stable-diffusion-xl"].make()
    pipe.to(device)


def decode_two_sizes(device: torch.device) -> None:
    """One layer at two sizes."""
    layer = torch.nn.Conv2d(4, 8, 3).to(device)
    for side in (8, 12):
        layer(torch.ones(1, 4, side, side, device=device))


def fill_position_ids(device: torch.device) -> None:
    """Position ids of a padded prompt, as transformers makes them."""
    mask = torch.tensor([[0, 0, 1, 1, 1]], device=device)
    position_ids = mask.long().cumsum(-1) - 1
    position_ids.masked_fill_(mask == 0, 1)


def add_host_and_device(device: torch.device) -> None:
    """Two tensors, one of them left behind."""
    torch.ones(1, 8, device=device) + torch.ones(1, 8)


def make_mask_on_cuda(device: torch.device) -> None:
    """A helper whose device is cuda unless it is told."""

    def get_mask(latents: torch.Tensor, device: str = "cuda") -> torch.Tensor:
        return torch.ones(1, *latents.shape[1:], device=device)

    get_mask(torch.ones(1, 4, 8, 8, device=device))


def scale_gradients(device: torch.device) -> None:
    """One step of mixed-precision training, whose gradients are given: the fault lies in unscaling them."""
    model = torch.nn.Linear(4, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device.type)
    scaler.scale(torch.ones(1, device=device))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    scaler.step(optimizer)


def attend_at_a_large_size(device: torch.device) -> None:
    """Attention whose scores would fill more than 4 GiB."""
    query = torch.zeros(1, 10, 96 * 112, 1, device=device)  # 4.3 GiB of scores; heads of one number take seconds here
    functional.scaled_dot_product_attention(query, query, query)


def load_weights_in_bfloat16(device: torch.device) -> None:
    """Weights in bfloat16."""
    torch.nn.Linear(8, 8).to(torch.bfloat16).to(device)


def compare_int64(device: torch.device) -> None:
    """A comparison beyond 32 bits."""
    ids = torch.tensor([1, 2**33], device=device)
    torch.eq(ids, torch.tensor([1, 1], device=device))
