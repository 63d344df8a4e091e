"""Models and pipelines that compile in a fraction of the time that those of the recipes take."""

from typing import Any

import diffusers
import torch

from anyaccel.recipes import recipes

__all__ = ["Blocks", "make_small", "shrink"]


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
    """Return a plain diffusers pipeline with a smaller UNet."""
    pipe: Any = recipes()[name].make()
    pipe.unet = shrink(pipe.unet)
    return pipe


def shrink(unet: Any) -> Any:
    """Return a UNet with one level, one cross attention and no mid block."""
    smaller = {
        "down_block_types": ("CrossAttnDownBlock2D",),
        "up_block_types": ("UpBlock2D",),
        "mid_block_type": None,
        "block_out_channels": (8,),
    }
    unet_class: Any = diffusers.UNet2DConditionModel
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20)
        return unet_class.from_config({**unet.config, **smaller}).eval()
