"""What the calls of the recipes have in common: the prompt, the seed, pictures and clips."""

from __future__ import annotations

from typing import Any

from anyaccel.recipes.lazy_modules import numpy, torch

__all__ = ["clip_of", "embedding", "generator", "mask", "picture", "prompted", "unprompted"]


def generator() -> Any:
    """A generator of the host with a fixed seed."""
    return torch.Generator("cpu").manual_seed(7)


def unprompted(**more: Any) -> dict[str, Any]:
    """Two steps, seeded, with an array as the result."""
    return {"num_inference_steps": 2, "generator": generator(), "output_type": "np"} | more


def prompted(**more: Any) -> dict[str, Any]:
    """The same with a prompt, and with guidance."""
    return unprompted(prompt="a red fox", guidance_scale=5.0) | more


def picture(size: int, *, seed: int = 1) -> Any:
    """A square picture of coloured blocks."""
    from PIL import Image

    blocks = numpy.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=numpy.uint8)
    return Image.fromarray(blocks).resize((size, size), Image.Resampling.BILINEAR)


def mask(size: int) -> Any:
    """A mask whose left half is to be painted."""
    from PIL import Image

    half = numpy.zeros((size, size), dtype=numpy.uint8)
    half[:, : size // 2] = 255
    return Image.fromarray(half)


def clip_of(frames: int, size: int) -> list[Any]:
    """A clip: that many pictures."""
    return [picture(size, seed=seed) for seed in range(frames)]


def embedding(*shape: int, seed: int = 3) -> Any:
    """What another model would have made of a picture or a text: noise of that shape."""
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed))
