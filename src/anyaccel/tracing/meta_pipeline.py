"""Full-size pipelines without trained weights, built from a model's config files."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from anyaccel.errors import AnyaccelError, ModelError
from anyaccel.recipes import Recipe
from anyaccel.tracing.missing_encoders import MissingConfig, find_output_widths
from anyaccel.tracing.model_folder import Component, ModelFolder, is_a, require_recipe
from anyaccel.upstream.diffusers_internals import read_optional_components
from anyaccel.upstream.diffusers_loading import list_component_specs
from anyaccel.upstream.modular_blocks import disable_progress_bars

__all__ = ["FullSizePipeline", "build_components", "build_pipeline"]

# Keys of a transformers config that describe the checkpoint, not the architecture.
_IGNORED_SETTINGS = ("architectures", "model_type", "torch_dtype", "dtype", "transformers_version")


# Side in pixels of the images that are converted for a safety checker.
_CORNER = 64


class FullSizePipeline:
    """A pipeline with full-size, untrained models, and the recipe that provides its call arguments."""

    def __init__(self, pipe: Any, recipe: Recipe, not_included: tuple[MissingConfig, ...] = ()) -> None:
        self.pipe, self.recipe, self.not_included = pipe, recipe, not_included


def build_pipeline(
    folder: ModelFolder,
    device: str,
    dtype: torch.dtype,
    finish: Callable[[str, Any], Any] | None = None,
    replace_encoder: Callable[[str, Any, Mapping[int, int]], Any] | None = None,
) -> FullSizePipeline:
    """Build a pipeline with full-size, untrained models from the config files in a model folder.

    The models are created on `device`; the `meta` device needs no memory. Tokenizers and processors are
    those of the recipe's tiny pipeline: they have no weights and produce outputs with the same lengths
    as the real ones. `finish(name, model)` is called for each model and returns the model to use.
    `replace_encoder(name, tiny, widths)` returns the model to use instead of an encoder without a config file, where
    `widths` maps widths of the tiny model's output to those of the encoder. Without it, such an encoder is an error.
    """
    import diffusers

    recipe = require_recipe(folder.pipeline)
    tiny: Any = recipe.make()
    components = dict(tiny.components)
    not_included: list[MissingConfig] = []
    settings = {name for name in tiny.config if not name.startswith("_")} - set(components)
    components |= {name: value for name, value in folder.switches.items() if name in settings}
    for component in folder.components:
        tiny_component = components.get(component.name)
        if hasattr(tiny_component, "set_timesteps") and component.config is not None:
            with _name_config_file(component):
                components[component.name] = _find_class(component).from_config(dict(component.config))
        elif component.config is None:
            if tiny_component is None:
                components[component.name] = _make_processor(component)
            elif isinstance(tiny_component, torch.nn.Module):
                missing = MissingConfig(component.name, component.kind, folder.find_folder(component.name))
                if replace_encoder is None or not _is_encoder(tiny_component):
                    raise missing.make_error(folder.pipeline)
                not_included.append(missing)
        elif _is_model(tiny_component, component):
            with _name_config_file(component):
                model = _make_model(tiny_component, component, device, dtype)
            components[component.name] = finish(component.name, model) if finish else model
    pipeline_class: Any = getattr(diffusers, folder.pipeline)
    optional = {*read_optional_components(pipeline_class), *folder.absent}
    not_included += _remove_unlisted(
        components, set(tiny.components), folder, optional, keep=replace_encoder is not None
    )
    if replace_encoder is not None:
        for missing in not_included:
            encoder: Any = torch.nn.Module.to(components[missing.name], dtype)
            widths = find_output_widths(encoder, tiny.components, components)
            components[missing.name] = replace_encoder(missing.name, encoder, widths)
    _extend_tokenizers(components)
    pipe = pipeline_class(**components) if folder.make_empty is None else _fill(folder.make_empty(recipe), components)
    disable_progress_bars(pipe)
    _crop_checked_images(pipe)
    return FullSizePipeline(pipe, recipe, tuple(not_included))


def _crop_checked_images(pipe: Any) -> None:
    """Convert only a corner of the images for a safety checker, which resizes them to a fixed size.

    The images of a trace contain only zeros. Converting a large one to a PIL image takes a second.
    """
    processor: Any = getattr(pipe, "image_processor", None)
    if getattr(pipe, "safety_checker", None) is not None and hasattr(processor, "numpy_to_pil"):
        convert: Callable[..., Any] = processor.numpy_to_pil
        processor.numpy_to_pil = lambda images: convert(images[..., :_CORNER, :_CORNER, :])


def _fill(pipe: Any, components: Mapping[str, Any]) -> Any:
    """Return a modular pipeline with these components; it creates the others, such as guiders, from configs."""
    loaded = list_component_specs(pipe)
    pipe.update_components(**{name: value for name, value in components.items() if name in loaded})
    return pipe


@contextlib.contextmanager
def _name_config_file(component: Component) -> Iterator[None]:
    """Convert exceptions in the `with` block to a `ModelError` that names the component's config file."""
    try:
        yield
    except AnyaccelError:
        raise
    except Exception as error:
        raise ModelError(
            f"cannot build {component.name} from {component.file}: {type(error).__name__}: {error}",
            hint="compare the file with the published one, or set ANYACCEL_TRACEBACK=1 to print the traceback",
        ) from error


def build_components(components: Iterable[Component], device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Build untrained models, schedulers and guiders from their configs; return them by component name."""
    built: dict[str, Any] = {}
    for component in components:
        component_class = _find_class(component)
        if issubclass(component_class, torch.nn.Module):
            built[component.name] = _make_model(None, component, device, dtype)
        else:
            built[component.name] = component_class.from_config(dict(component.config or {}))
    return built


def _remove_unlisted(
    components: dict[str, Any], names: set[str], folder: ModelFolder, optional: set[str], *, keep: bool
) -> list[MissingConfig]:
    """Set the models that a folder does not list to None, and return the encoders that the pipeline requires.

    With `keep=False`, those are set to None as well.
    """
    required = []
    for name in sorted(names - {component.name for component in folder.components}):
        if keep and name not in optional and _is_encoder(components[name]):
            required.append(MissingConfig(name, type(components[name]).__name__, folder.find_folder(name)))
        elif isinstance(components[name], torch.nn.Module):  # an optional component that this model does not have
            components[name] = None
    return required


def _is_encoder(tiny: Any) -> bool:
    """Return whether a model encodes prompts or images: diffusers takes these models from transformers."""
    return isinstance(tiny, torch.nn.Module) and type(tiny).__module__.startswith("transformers.")


def _is_model(tiny: Any, component: Component) -> bool:
    if tiny is not None:
        return isinstance(tiny, torch.nn.Module)
    component_class = _find_class(component)
    return isinstance(component_class, type) and issubclass(component_class, torch.nn.Module)


def _make_model(tiny: Any, component: Component, device: str, dtype: torch.dtype) -> Any:
    # The class of the recipe's model is preferred: the index may have an older name of it.
    model_class = type(tiny) if tiny is not None and is_a(tiny, component) else _find_class(component)
    config = dict(component.config or {})
    # The default dtype avoids a float32 copy of the model, twice its final size.
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device), torch.no_grad():
            if hasattr(model_class, "config_class") and model_class.config_class is not None:  # transformers
                settings = {
                    name: value for name, value in config.items() if name not in _IGNORED_SETTINGS and name[0] != "_"
                }
                model = model_class(model_class.config_class(**settings))
            else:
                model = model_class.from_config(config)
    finally:
        torch.set_default_dtype(before)
    # Not diffusers' `to`, which warns about modules that should stay in float32.
    return torch.nn.Module.to(model, dtype).eval()


def _make_processor(component: Component) -> Any:
    """Return an image processor or feature extractor with default options.

    Returns None for other components, such as tokenizers.
    """
    # transformers 5 saves `CLIPImageProcessorPil` where torchvision is not installed, and `…Fast` where it is.
    if not re.search(r"(ImageProcessor(Fast|Pil)?|FeatureExtractor)$", component.kind):
        return None
    return _find_class(component)()


def _find_class(component: Component) -> Any:
    """Import the class that `model_index.json` names for a component.

    Raises `ModelError` if neither the library nor the diffusers pipeline package contains the class.
    """
    for module in (component.library, f"diffusers.pipelines.{component.library}"):
        try:
            component_class = getattr(importlib.import_module(module), component.kind, None)
        except ImportError:
            continue
        if component_class is not None:
            return component_class
    raise ModelError(
        f"cannot import {component.kind} from {component.library}, which the component {component.name} requires",
        hint="upgrade with `pip install -U diffusers transformers`; custom code in the model repository is not "
        "supported",
    )


def _extend_tokenizers(components: dict[str, Any]) -> None:
    """Set each tokenizer's maximum length to at least 77.

    The length never exceeds the number of positions that the text encoder supports.
    """
    for name, tokenizer in components.items():
        if not name.startswith("tokenizer"):
            continue
        encoder = components.get(name.replace("tokenizer", "text_encoder"))
        positions = getattr(getattr(encoder, "config", None), "max_position_embeddings", None)
        if positions is not None and hasattr(tokenizer, "model_max_length"):
            tokenizer.model_max_length = min(positions, max(tokenizer.model_max_length, 77))  # 77: CLIP
