"""Random weights that do not depend on how a library initialises, or forgets to initialise, its layers."""

from __future__ import annotations

import math
from typing import Any

from anyaccel.recipes.lazy_modules import torch

__all__ = ["draw_weights"]

SCALE_NAMES = {"weight", "weight_g", "gamma", "scale"}


def draw_weights(module: Any, *, seed: int) -> None:
    """Fill every parameter anew, so that none is zero: an adapter that starts at zero would hide its branch."""
    generator = torch.Generator("cpu").manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        parameter.data.copy_(_shape_noise(name.rsplit(".", 1)[-1], noise))


def _shape_noise(name: str, noise: Any) -> Any:
    """Noise around one for the scale of a norm and zero for the rest, so small that activations stay near one."""
    is_vector = noise.ndim == 0 or noise.shape[0] == noise.numel()
    if is_vector and name in SCALE_NAMES:
        return 1 + 0.1 * noise
    if is_vector:
        return 0.1 * noise
    return noise / math.sqrt(noise.numel() / noise.shape[0])
