"""A footprint: what a pipeline holds on a device, by component and by phase, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["PHASES", "Footprint", "Model", "Phase"]

Phase: TypeAlias = Literal["encode", "denoise", "decode"]
PHASES: tuple[Phase, ...] = ("encode", "denoise", "decode")


@dataclass(frozen=True, kw_only=True)
class Model:
    """One model of a pipeline at one size, batch and number type."""

    name: str
    """`transformer`, `vae`."""
    kind: str
    parameters: int
    weights_bytes: int
    largest_layer_bytes: int
    """The weights of its largest layer: what is there at least where layers come and go."""
    phases: tuple[Phase, ...]
    """In which it runs; an autoencoder may encode and decode."""
    held_bytes: int
    """At the peak of a call, beside the weights."""
    held_alone_bytes: int
    """The same for one image of the batch."""
    held_sliced_bytes: int | None = None
    """With attention in slices; None where that changes nothing."""
    held_tiled_bytes: int | None = None
    """With the picture in tiles; None for a model that makes none."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """All models of a pipeline, and what passes between them."""

    pipeline: str
    dtype: str
    width: int
    height: int
    batch: int
    models: tuple[Model, ...]
    between_bytes: int = 0
    """Latents, embeddings and the picture."""

    @property
    def weights_bytes(self) -> int:
        """The weights of every model."""
        return sum(model.weights_bytes for model in self.models)

    def of(self, phase: Phase) -> tuple[Model, ...]:
        """The models that run in a phase."""
        return tuple(model for model in self.models if phase in model.phases)
