"""Dataclasses for the properties of a pipeline that a plan depends on, such as component dtypes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ComponentFacts", "PipelineFacts", "WeightError"]


@dataclass(frozen=True, kw_only=True)
class WeightError:
    """The relative errors `‖W - Q‖ / ‖W‖` of the layers of a model that anyaccel has quantized."""

    format: str
    """The format as in the option `weights=`: `int8`."""
    layers: int
    mean: float
    """NaN if the weights are not known."""
    worst: float
    worst_layer: str


@dataclass(frozen=True, kw_only=True)
class ComponentFacts:
    """Properties of one model in a pipeline, such as the class, dtype and size of a denoiser or VAE."""

    name: str
    """The pipeline's name for it: `unet`, `text_encoder_2`."""
    kind: str
    """The class: `UNet2DConditionModel`."""
    dtype: str
    """The dtype of its weights now: `float32`."""
    parameters: int
    """The number of parameters; those of quantized weights count before quantization."""
    packed_parameters: int = 0
    """How many of them are in quantized weights."""
    packed_bytes: int = 0
    """The size of the quantized weights, with their scales."""
    weight_error: WeightError | None = None
    """The error of the weights that `weights=` has quantized."""
    denoises: bool = False
    """Whether its forward takes a timestep, so it runs at every step."""
    blocks: int = 0
    """The number of repeated blocks, which share one compilation; 0 if none are known."""
    # Compared with `blocks` to decide whether to compile only the blocks.
    convolutions: int = 0
    """The number of 2D and 3D convolutions."""
    quantized: bool = False
    """Whether its weights are quantized: it can be moved but not cast."""
    weight_libraries: tuple[str, ...] = ()
    """The libraries that made its quantized linear layers, the float8 dtypes of plain ones, and the formats of layers
    that anyaccel has replaced."""
    has_own_dtype: bool = False
    """Whether it may have been loaded in the dtype of its own config, as transformers does by default."""
    splits: tuple[str, ...] = ()
    """The parallel plans that diffusers has for it: `context`, `tensor`."""
    heads: int = 0
    """The number of attention heads, which a parallel split must divide; 0 if unknown."""
    sharded: int = 0
    """The number of parameters that a tensor-parallel split shards."""

    def count_bytes(self, itemsize: int) -> int:
        """Return the size of the weights if those that are not quantized have this number of bytes each."""
        return (self.parameters - self.packed_parameters) * itemsize + self.packed_bytes


@dataclass(frozen=True, kw_only=True)
class PipelineFacts:
    """The class of a pipeline and the properties of its components."""

    pipeline: str
    """The class: `StableDiffusionXLPipeline`."""
    components: tuple[ComponentFacts, ...] = ()

    @property
    def denoiser_dtypes(self) -> frozenset[str]:
        """The dtypes in which the denoisers were loaded, or those of all components if there is no denoiser."""
        # Not the text encoders: transformers loads them in the dtype of their own config, which nobody chose.
        denoisers = [component for component in self.components if component.denoises]
        return frozenset(component.dtype for component in denoisers or self.components)

    @property
    def main_dtype(self) -> str:
        """The dtype in which the first denoiser was loaded, or the first component if there is no denoiser."""
        denoisers = [component for component in self.components if component.denoises]
        return next((component.dtype for component in denoisers or self.components), "float32")

    @property
    def has_mixed_dtypes(self) -> bool:
        """Whether the user loaded the components in different dtypes."""
        chosen = [component for component in self.components if not component.quantized]
        # float32 is the default of a component without a dtype of its own, so a half precision was chosen by somebody.
        dtypes = {c.dtype for c in chosen if c.dtype == "float32" or not c.has_own_dtype}
        return len(dtypes) > 1

    @property
    def denoisers(self) -> tuple[str, ...]:
        """The names of the components that run at every denoising step."""
        return tuple(component.name for component in self.components if component.denoises)
