"""Pipeline call arguments shared by recipes: prompts, seeds, images and videos."""

from __future__ import annotations

from typing import Any

from anyaccel.recipes.lazy_modules import numpy, torch

__all__ = ["embedding", "generator", "make_image", "make_video", "mask", "prompted", "unprompted"]


def generator() -> Any:
    """Return a CPU `torch.Generator` with a fixed seed."""
    # On the CPU, because devices draw other values from the same seed.
    return torch.Generator("cpu").manual_seed(7)


def unprompted(**more: Any) -> dict[str, Any]:
    """Return call arguments without a prompt: two steps, a seeded generator and NumPy output."""
    # Two steps: multistep schedulers use the previous output only from the second one on.
    return {"num_inference_steps": 2, "generator": generator(), "output_type": "np"} | more


def prompted(**more: Any) -> dict[str, Any]:
    """Return call arguments with a prompt and guidance: two steps, a seeded generator and NumPy output."""
    return unprompted(prompt="a red fox", guidance_scale=5.0) | more


def make_image(size: int, *, seed: int = 1) -> Any:
    """Return a square PIL image with random colors that depend only on the seed."""
    from PIL import Image

    blocks = numpy.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=numpy.uint8)
    return Image.fromarray(blocks).resize((size, size), Image.Resampling.BILINEAR)


def mask(size: int) -> Any:
    """Return a square inpainting mask that covers the left half of an image."""
    from PIL import Image

    half = numpy.zeros((size, size), dtype=numpy.uint8)
    half[:, : size // 2] = 255
    return Image.fromarray(half)


def make_video(frames: int, size: int) -> list[Any]:
    """Return a video as a list of square PIL images, each with different random colors."""
    return [make_image(size, seed=seed) for seed in range(frames)]


def embedding(*shape: int, seed: int = 3) -> Any:
    """Return a tensor of seeded noise, for use as an image or prompt embedding."""
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed))
