"""Call arguments and outputs of a pipeline, which are known before its weights are loaded."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from anyaccel.generation.guider import GUIDANCE_SCALE, read_guider_scale
from anyaccel.generation.model_name import ResolvedModel
from anyaccel.media.types import Kind
from anyaccel.runtime.call_parameters import (
    find_missing_arguments,
    list_block_outputs,
    read_blocks,
    read_call_parameters,
    read_class_parameters,
)
from anyaccel.runtime.introspection import plain_class

__all__ = [
    "AUDIO_OUTPUTS",
    "IMAGE_OUTPUTS",
    "VIDEO_OUTPUTS",
    "PipelineInterface",
    "find_interface",
    "make_class_interface",
    "read_interface",
]

# Names that the outputs of pipelines and of modular blocks use.
IMAGE_OUTPUTS = ("images", "image")
VIDEO_OUTPUTS = ("frames", "videos", "video")
AUDIO_OUTPUTS = ("audios", "audio", "sound")
_MEDIA_OUTPUTS = (*VIDEO_OUTPUTS, *IMAGE_OUTPUTS, *AUDIO_OUTPUTS)
# Pipelines whose output `images` contains the frames of a video (diffusers 0.42).
_FRAMES_AS_IMAGES = frozenset(
    ("ShapEPipeline", "ShapEImg2ImgPipeline", "TextToVideoZeroPipeline", "TextToVideoZeroSDXLPipeline")
)


@dataclass(frozen=True, kw_only=True)
class PipelineInterface:
    """The call arguments and outputs of a pipeline class, or of the blocks of a modular pipeline."""

    name: str
    """Class name, such as `StableDiffusionPipeline`."""
    parameters: Mapping[str, inspect.Parameter]
    """Named parameters of the call."""
    outputs: tuple[str, ...]
    """Names of the outputs, such as `images`; empty if they are unknown."""
    pipeline_class: type | None = None
    """Class of diffusers; None for a modular pipeline."""
    pipe: Any = None
    """The pipeline. Before loading, a modular pipeline without its components, and None for others."""
    is_loaded: bool = False
    components: Mapping[str, str] = field(default_factory=dict)
    """Class names of the components in the index; empty if they are unknown."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the pipeline in the index, such as `expand_timesteps`."""

    @property
    def kind(self) -> Kind | None:
        """The kind of media that the pipeline generates, or None if it is unknown."""
        if self.name in _FRAMES_AS_IMAGES or set(self.outputs) & set(VIDEO_OUTPUTS):
            return "video"
        if set(self.outputs) & set(IMAGE_OUTPUTS):
            return "image"
        return "audio" if set(self.outputs) & set(AUDIO_OUTPUTS) else None

    @property
    def with_audio(self) -> bool:
        """Whether the videos may have an audio track."""
        return self.kind == "video" and bool(set(self.outputs) & set(AUDIO_OUTPUTS))

    @property
    def arguments(self) -> list[str]:
        """Names of all call arguments, including the guidance scale of a modular pipeline's guider."""
        if GUIDANCE_SCALE in self.parameters or self.pipe is None:
            return list(self.parameters)
        # Before loading, it is not known whether there is a guider.
        own_scale = read_guider_scale(self.pipe) is not None if self.is_loaded else read_blocks(self.pipe) is not None
        return [*self.parameters, *([GUIDANCE_SCALE] if own_scale else [])]

    def find_missing(self, call: Mapping[str, Any]) -> list[str]:
        """Return the names of the required arguments that are not in the call."""
        if self.pipe is not None:
            return find_missing_arguments(self.pipe, {name: call[name] for name in call if name in self.parameters})
        return [name for name, item in self.parameters.items() if item.default is item.empty and name not in call]

    def find_default(self, name: str) -> Any:
        """Return the default value of a call argument, or None if there is none."""
        parameter = self.parameters.get(name)
        if parameter is None and name == GUIDANCE_SCALE and self.pipe is not None:
            return read_guider_scale(self.pipe)
        return None if parameter is None or parameter.default is parameter.empty else parameter.default


def read_interface(pipe: Any) -> PipelineInterface:
    """Return the interface of a loaded pipeline."""
    return PipelineInterface(
        name=plain_class(pipe).__name__,
        parameters=read_call_parameters(pipe),
        outputs=_list_outputs(pipe),
        pipeline_class=None if read_blocks(pipe) is not None else plain_class(pipe),
        pipe=pipe,
        is_loaded=True,
        settings=dict(getattr(pipe, "config", {})),
        components={
            name: type(value).__name__ for name, value in getattr(pipe, "components", {}).items() if value is not None
        },
    )


def find_interface(model: ResolvedModel) -> PipelineInterface | None:
    """Return the interface of a model that is not loaded yet, or None if only loading it shows its class.

    For a Hub model, this downloads its index.
    """
    from anyaccel.runtime.loading import find_pipeline_class
    from anyaccel.runtime.modular_loading import create_modular_pipeline
    from anyaccel.upstream.modular_index import is_modular_folder

    if is_modular_folder(Path(model.source)):
        return dataclasses.replace(read_interface(create_modular_pipeline(model.source)), is_loaded=False)
    kind, components, settings = find_pipeline_class(model.source, model.revision)
    return None if kind is None else make_class_interface(kind, components, settings)


def make_class_interface(
    kind: type, components: Mapping[str, str], settings: Mapping[str, Any] = MappingProxyType({})
) -> PipelineInterface:
    """Return the interface of a pipeline class of diffusers."""
    return PipelineInterface(
        name=kind.__name__,
        parameters=read_class_parameters(kind),
        outputs=_list_class_outputs(kind),
        pipeline_class=kind,
        components=components,
        settings=settings,
    )


def _list_outputs(pipe: Any) -> tuple[str, ...]:
    if read_blocks(pipe) is None:
        return _list_class_outputs(plain_class(pipe))
    names = list_block_outputs(pipe)  # all values that the blocks compute, if they are not those of diffusers
    return tuple(name for name in names if name in (*_MEDIA_OUTPUTS, "action")) or tuple(names[-1:])


def _list_class_outputs(kind: Any) -> tuple[str, ...]:
    """Return the fields of the output classes in the module of a pipeline class."""
    from diffusers.utils.outputs import BaseOutput

    # Not the return annotation: many pipelines of diffusers have none.
    module = inspect.getmodule(inspect.unwrap(kind.__call__))
    if module is None:  # for example a class that was created with exec()
        return ()
    classes: list[Any] = [value for value in vars(module).values() if isinstance(value, type)]
    outputs = [value for value in classes if issubclass(value, BaseOutput) and value is not BaseOutput]
    return tuple(dict.fromkeys(item.name for output in outputs for item in dataclasses.fields(output)))
