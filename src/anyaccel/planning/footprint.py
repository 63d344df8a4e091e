"""Memory footprint of one pipeline call: the weights and activations of each model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

__all__ = ["PHASES", "Footprint", "Measure", "MemorySavings", "ModelCall", "ModelSize", "Phase", "Work"]

Phase: TypeAlias = Literal["encode", "denoise", "decode"]
# Denoising steps of a footprint.
_TRACED_STEPS = 2
PHASES: tuple[Phase, ...] = ("encode", "denoise", "decode")


@dataclass(frozen=True)
class MemorySavings:
    """Techniques that reduce activation memory, such as VAE tiling and sliced attention."""

    vae_in_parts: bool = False
    """Whether the VAE processes one image at a time, and images larger than its training size in tiles."""
    sliced_attention: bool = False
    """Whether attention runs one head at a time."""


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """The size of one model's weights, in parameters and in bytes."""

    name: str
    """`transformer`, `vae`."""
    kind: str
    parameters: int
    weights_bytes: int
    """Bytes on the device, in the dtype that the model runs in."""
    layer_bytes: int
    """Peak bytes on the device if layers are streamed one by one, including the prefetched one."""


@dataclass(frozen=True)
class Work:
    """Work of a model call, which determines its time."""

    flops: float = 0.0
    """Floating-point operations of matrix products, convolutions and attention."""
    traffic_bytes: float = 0.0
    """Bytes that all other kernels read and write."""
    kernels: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.traffic_bytes + other.traffic_bytes, self.kernels + other.kernels)

    def __sub__(self, other: Work) -> Work:
        return self + other * -1

    def __mul__(self, count: float) -> Work:
        return Work(self.flops * count, self.traffic_bytes * count, self.kernels * count)


@dataclass(frozen=True)
class ModelCall:
    """One forward call of a model, and its peak memory without weights."""

    component: str
    phase: Phase
    # Weights are counted separately: the same trace serves every residence (see `predict`).
    held_bytes: int
    """Peak bytes of activations and of the tensors that the pipeline holds; without weights."""
    work: Work = Work()


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Memory use of one pipeline call for a given batch size, image size, dtype and memory savings."""

    pipeline: str
    dtype: str
    size: tuple[int, int] | None
    """Width and height; None if the pipeline generates no images."""
    images: int
    models: tuple[ModelSize, ...]
    model_calls: tuple[ModelCall, ...]
    """The model calls in order, for two denoising steps."""
    # From diffusers: model_cpu_offload_seq, the models excluded from offloading, and those without group offloading.
    offload_order: tuple[str, ...] = ()
    """The models that replace one another on the device, in diffusers' order."""
    never_offloaded: tuple[str, ...] = ()
    """The models that diffusers never offloads."""
    never_streamed: tuple[str, ...] = ()
    """The models that stay on the device completely while layers of others are streamed."""
    fixed_bytes: int = 0
    """Bytes held by libraries, such as cuBLAS workspaces."""

    loops: int = 2
    """Iterations of the denoising loop, for two denoising steps; PNDM, for example, adds one."""
    loops_per_step: int = 1
    """Iterations for each additional step; schedulers of second order have two."""

    def count_loops(self, steps: int) -> float:
        """Return how many times the model calls of the denoising loop run with this number of steps."""
        return (self.loops + (steps - _TRACED_STEPS) * self.loops_per_step) / self.loops

    @property
    def weights_bytes(self) -> int:
        """The total size of all weights in bytes."""
        return sum(model.weights_bytes for model in self.models)

    def model(self, name: str) -> ModelSize:
        """Return the size of the model with this name."""
        return next(model for model in self.models if model.name == name)


class Measure(Protocol):
    """A function that returns the footprint of a pipeline call."""

    def __call__(self, savings: MemorySavings, images: int, images_per_call: int | None = None, /) -> Footprint:
        """Return the footprint of a call for `images` images, of which models run `images_per_call` at a time."""
