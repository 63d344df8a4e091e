"""Facts: what a plan needs to know of a pipeline, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ComponentFacts", "PipelineFacts"]


@dataclass(frozen=True, kw_only=True)
class ComponentFacts:
    """One model of a pipeline: its denoiser, an encoder, its autoencoder."""

    name: str
    """As the pipeline calls it: `unet`, `text_encoder_2`."""
    kind: str
    """The class: `UNet2DConditionModel`."""
    dtype: str
    """The type of its weights now: `float32`."""
    parameters: int
    denoises: bool = False
    """Whether it takes a timestep, and so runs at every step."""
    blocks: int = 0
    """How many blocks of it are repeated, so that one of them is compiled for all; 0 where none are known."""
    convolutions: int = 0
    """How many convolutions over pictures it has."""
    quantized: bool = False
    """Whether its weights are quantized, so that it can be moved and not cast."""
    splits: tuple[str, ...] = ()
    """What of it diffusers has a plan to split over devices: `context`, `tensor`."""
    heads: int = 0
    """The heads of its attention, which such a split shares out; 0 where they are not known."""
    sharded: int = 0
    """How many of its parameters a tensor split shares out."""


@dataclass(frozen=True, kw_only=True)
class PipelineFacts:
    """A pipeline, as far as a plan depends on it."""

    pipeline: str
    """The class: `StableDiffusionXLPipeline`."""
    components: tuple[ComponentFacts, ...] = ()

    @property
    def denoiser_dtypes(self) -> frozenset[str]:
        """The types that the weights of its denoisers were loaded in; of all models where none denoises.

        What a text encoder has says little: transformers loads one in the type that its own config names.
        """
        denoisers = [component for component in self.components if component.denoises]
        return frozenset(component.dtype for component in denoisers or self.components)

    @property
    def denoisers(self) -> tuple[str, ...]:
        """The names of the models that run at every step."""
        return tuple(component.name for component in self.components if component.denoises)
