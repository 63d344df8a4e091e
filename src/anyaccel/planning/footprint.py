"""A footprint: what a pipeline holds on a device in one call, model by model, as plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["PHASES", "Footprint", "Measure", "MemorySavings", "ModelCall", "ModelSize", "Phase"]

Phase: TypeAlias = Literal["encode", "denoise", "decode"]
PHASES: tuple[Phase, ...] = ("encode", "denoise", "decode")


@dataclass(frozen=True)
class MemorySavings:
    """How a call is made to hold less, apart from where the weights are."""

    vae_in_parts: bool = False
    """Whether the autoencoder takes one image at a time, and one larger than it was trained on in tiles."""
    sliced_attention: bool = False
    """Whether attention runs one head at a time."""


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """The weights of one model."""

    name: str
    """`transformer`, `vae`."""
    kind: str
    parameters: int
    weights_bytes: int
    """As they lie on the device, in the type that they run in."""
    layer_bytes: int
    """The most that lies on the device where layers come and go one by one, with one that is fetched ahead."""


@dataclass(frozen=True)
class ModelCall:
    """One call of one model: when it runs, and what is held then."""

    component: str
    phase: Phase
    held_bytes: int
    """At its peak, with what the pipeline keeps besides; without weights."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """One call of a pipeline: so many images, of one size, in one type, made in one way."""

    pipeline: str
    dtype: str
    size: tuple[int, int] | None
    """Width and height; None for what makes no pictures."""
    images: int
    models: tuple[ModelSize, ...]
    passings: tuple[ModelCall, ...]
    """In the order in which they happen, of two steps."""
    offload_order: tuple[str, ...] = ()
    """The models that make room for one another, as diffusers lists them."""
    always_there: tuple[str, ...] = ()
    """The models that diffusers leaves on the device whatever is offloaded."""
    never_streamed: tuple[str, ...] = ()
    """The models that stay on the device whole where the layers of others come and go."""
    fixed_bytes: int = 0
    """What libraries hold besides."""

    @property
    def weights_bytes(self) -> int:
        """The weights of every model."""
        return sum(model.weights_bytes for model in self.models)

    def model(self, name: str) -> ModelSize:
        """The model of that name."""
        return next(model for model in self.models if model.name == name)


Measure: TypeAlias = Callable[[MemorySavings, int], Footprint]
"""The footprint of a call made in one way, for so many images at once."""
