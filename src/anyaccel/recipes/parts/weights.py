"""Random weights that do not depend on any library's weight initialization."""

from __future__ import annotations

import math
from typing import Any

from anyaccel.recipes.lazy_modules import torch

__all__ = ["draw_weights"]

SCALE_NAMES = {"weight", "weight_g", "gamma", "scale"}


def draw_weights(module: Any, *, seed: int) -> None:
    """Fill every parameter of a module with seeded random values."""
    # ControlNets and adapters start with zero weights: their branch would not affect the output.
    generator = torch.Generator("cpu").manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        parameter.data.copy_(_shape_noise(name.rsplit(".", 1)[-1], noise))


def _shape_noise(name: str, noise: Any) -> Any:
    """Scale noise to parameter values with mean 1 for norm scales and mean 0 for other parameters."""
    # Divided by the square root of the fan-in, which keeps the variance of activations near 1.
    is_vector = noise.ndim == 0 or noise.shape[0] == noise.numel()
    # A single alpha is the slope of a tanh that replaces a norm. Several are logarithms, for example in Snake.
    is_slope = name == "alpha" and noise.numel() == 1
    if is_slope or (is_vector and name in SCALE_NAMES):
        return 1 + 0.1 * noise
    if is_vector:
        return 0.1 * noise
    return noise / math.sqrt(noise.numel() / noise.shape[0])
