"""Models and pipelines that compile in a fraction of the time that those of the recipes take."""

from typing import Any

import torch

from anyaccel.recipes import recipes

__all__ = ["Blocks", "make_small", "shrink", "shrink_autoencoder"]


class Blocks(torch.nn.Module):
    """A model with one repeated block."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.block = block
        self.eval()

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.block(sample)
        return output

    def compile_repeated_blocks(self, **options: Any) -> None:
        self.block.compile(**options)


def make_small(name: str = "stable-diffusion") -> Any:
    """Return a plain diffusers pipeline with a smaller UNet and autoencoder."""
    pipe: Any = recipes()[name].make()
    pipe.unet = shrink(pipe.unet)
    pipe.vae = shrink_autoencoder(pipe.vae)
    pipe.vae_scale_factor = 1
    return pipe


def shrink(unet: Any) -> Any:
    """Return a UNet with one level, one cross attention and no mid block."""
    smaller = {
        "down_block_types": ("CrossAttnDownBlock2D",),
        "up_block_types": ("UpBlock2D",),
        "mid_block_type": None,
        "block_out_channels": (8,),
    }
    return _make(unet, smaller)


def shrink_autoencoder(vae: Any) -> Any:
    """Return an image autoencoder with one level, so that the latents are as large as the image."""
    smaller = {
        "down_block_types": ("DownEncoderBlock2D",),
        "up_block_types": ("UpDecoderBlock2D",),
        "block_out_channels": (8,),
    }
    return _make(vae, smaller)


def _make(model: Any, changes: dict[str, Any]) -> Any:
    """Return a new model with the configuration of another one and some changes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20)
        return type(model).from_config({**model.config, **changes}).eval()
