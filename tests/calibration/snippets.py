"""Snippets from users and models that failed on more than one device."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from anyaccel.recipes import recipes
from anyaccel.recipes.lazy_modules import diffusers


def rotate_in_float64(device: torch.device) -> None:
    """Compute FLUX's rotary embeddings with float64 angles, as before diffusers cast them."""
    rotate = diffusers.models.embeddings.get_1d_rotary_pos_embed
    rotate(16, torch.arange(8, device=device), use_real=True, freqs_dtype=torch.float64)


def rotate_in_float64_einsum(device: torch.device) -> None:
    """Compute the rotary embeddings of PRX and ERNIE-Image."""
    position, dim = torch.arange(8, device=device), 16
    scale = torch.arange(0, dim, 2, dtype=torch.float64, device=position.device) / dim
    torch.einsum("n,d->nd", position, 1.0 / 10000**scale)


def rotate_in_float64_linspace(device: torch.device) -> None:
    """Compute FLUX's rotary embeddings as in ComfyUI."""
    position, dim = torch.zeros(1, 8, device=device), 16
    scale = torch.linspace(0, (dim - 2) / dim, steps=dim // 2, dtype=torch.float64, device=device)
    torch.einsum("...n,d->...nd", position.to(torch.float32), 1.0 / (10000**scale))


def rotate_wan_in_complex128(device: torch.device) -> None:
    """Apply Wan's rotary embeddings as in the original code."""
    angles = torch.outer(torch.arange(8), 1.0 / 10000 ** torch.arange(0, 16, 2).to(torch.float64).div(16))
    rotations = torch.polar(torch.ones_like(angles), angles).to(device)
    query = torch.ones(8, 2, 16, device=device)
    pairs = torch.view_as_complex(query.to(torch.float64).reshape(8, 2, -1, 2))
    torch.view_as_real(pairs * rotations.unsqueeze(1)).flatten(2).float()


def rotate_in_complex64(device: torch.device) -> None:
    """Apply rotary embeddings in complex64."""
    angles = torch.ones(8, 8, device=device)
    rotations = torch.polar(torch.ones_like(angles), angles)
    pairs = torch.view_as_complex(torch.ones(8, 2, 8, 2, device=device))
    torch.view_as_real(pairs * rotations.unsqueeze(1)).flatten(2)


def index_complex64_table(device: torch.device) -> None:
    """Index a complex table by positions."""
    rotations = torch.polar(torch.ones(16, 8), torch.ones(16, 8)).to(device)
    rotations[torch.arange(4, device=device)]


def gather_from_complex128_table(device: torch.device) -> None:
    """Gather positions from a complex table."""
    rotations = torch.polar(torch.ones(16, 8, dtype=torch.float64), torch.ones(16, 8, dtype=torch.float64)).to(device)
    torch.gather(rotations, 0, torch.zeros(4, 8, dtype=torch.int64, device=device))


def run_z_image(device: torch.device) -> None:
    """Run Z-Image with diffusers' complex rotary embeddings."""
    recipe = recipes()["z-image"]
    pipe: Any = recipe.make()
    pipe.to(device)(**recipe.call())


def pass_float_timestep_to_unet(device: torch.device) -> None:
    """Convert a Python float timestep to a tensor, as the UNet does."""
    timestep, sample = 981.0, torch.zeros(1, 4, 8, 8, device=device)
    dtype = torch.float64 if isinstance(timestep, float) else torch.int64
    torch.tensor([timestep], dtype=dtype, device=sample.device).expand(sample.shape[0])


def pass_int64_timestep_to_unet(device: torch.device) -> None:
    """Create an int64 timestep."""
    torch.tensor([981], dtype=torch.int64, device=device).expand(2)


def draw_on_device(device: torch.device) -> None:
    """Draw noise on the device."""
    torch.randn(1, 4, 8, 8, device=device)


def create_generator_on_device(device: torch.device) -> None:
    """Create a generator on the device."""
    torch.Generator(device=device).manual_seed(0)


def index_by_mask(device: torch.device) -> None:
    """Index by a mask: the length of the result depends on data."""
    hidden = torch.ones(8, 4, device=device)
    hidden[torch.arange(8, device=device) < 5]


def repeat_by_tensor(device: torch.device) -> None:
    """Call repeat_interleave with counts on the device."""
    lengths = torch.tensor([2, 1, 3], device=device)
    torch.repeat_interleave(torch.arange(3, device=device), lengths)


def load_weights_in_fp8(device: torch.device) -> None:
    """Move fp8 weights to the device."""
    torch.nn.Linear(8, 8).to(torch.float8_e4m3fn).to(device)


def load_sdxl(device: torch.device) -> None:
    """Move all models of SDXL to the device."""
    pipe: Any = recipes()["stable-diffusion-xl"].make()
    pipe.to(device)


def decode_two_sizes(device: torch.device) -> None:
    """Run a layer at two sizes."""
    layer = torch.nn.Conv2d(4, 8, 3).to(device)
    for side in (8, 12):
        layer(torch.ones(1, 4, side, side, device=device))


def fill_position_ids(device: torch.device) -> None:
    """Compute the position IDs of a padded prompt, as transformers does."""
    mask = torch.tensor([[0, 0, 1, 1, 1]], device=device)
    position_ids = mask.long().cumsum(-1) - 1
    position_ids.masked_fill_(mask == 0, 1)


def add_cpu_and_device(device: torch.device) -> None:
    """Add a device tensor and a CPU tensor."""
    torch.ones(1, 8, device=device) + torch.ones(1, 8)


def create_mask_on_cuda(device: torch.device) -> None:
    """Call a helper with `device="cuda"` as its default."""

    def get_mask(latents: torch.Tensor, device: str = "cuda") -> torch.Tensor:
        return torch.ones(1, *latents.shape[1:], device=device)

    get_mask(torch.ones(1, 4, 8, 8, device=device))


def scale_gradients(device: torch.device) -> None:
    """Run a GradScaler step with preset gradients, which are unscaled in float64."""
    model = torch.nn.Linear(4, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device.type)
    scaler.scale(torch.ones(1, device=device))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    scaler.step(optimizer)


def attend_at_large_size(device: torch.device) -> None:
    """Run attention with more than 4 GiB of scores."""
    query = torch.zeros(1, 10, 96 * 112, 1, device=device)  # one element per head; larger heads would be slow
    functional.scaled_dot_product_attention(query, query, query)


def load_weights_in_bfloat16(device: torch.device) -> None:
    """Move bfloat16 weights to the device."""
    torch.nn.Linear(8, 8).to(torch.bfloat16).to(device)


def compare_int64(device: torch.device) -> None:
    """Compare values beyond 32 bits."""
    ids = torch.tensor([1, 2**33], device=device)
    torch.eq(ids, torch.tensor([1, 1], device=device))
