"""A pipeline at its full size from its config files: models of the right classes and shapes, where they are wanted."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from anyaccel.errors import AnyaccelError, ModelError
from anyaccel.recipes import Recipe
from anyaccel.tracing.model_index import Component, ModelFolder, is_a, require_recipe

__all__ = ["FullSizePipeline", "build_components", "build_pipeline"]

_NO_SETTINGS = ("architectures", "model_type", "torch_dtype", "dtype", "transformers_version")


class FullSizePipeline:
    """A pipeline at its full size, and the recipe that says how it is called."""

    def __init__(self, pipe: Any, recipe: Recipe) -> None:
        self.pipe, self.recipe = pipe, recipe


def build_pipeline(
    folder: ModelFolder, device: str, dtype: torch.dtype, finish: Callable[[str, Any], Any] | None = None
) -> FullSizePipeline:
    """The pipeline of a folder with models of full size on a device, without trained weights; on `meta` they need none.

    Tokenizers and processors are the recipe's: they hold no weights, and their lengths are those of the real ones.
    `finish` is given each model with its name, and gives what takes its place.
    """
    import diffusers

    recipe = require_recipe(folder.pipeline)
    tiny: Any = recipe.make()
    parts = dict(tiny.components)
    own = {name for name in tiny.config if not name.startswith("_")} - set(parts)
    parts |= {name: value for name, value in folder.switches.items() if name in own}
    for component in folder.components:
        ours = parts.get(component.name)
        if hasattr(ours, "set_timesteps") and component.config is not None:
            with _naming(component):
                parts[component.name] = _find_class(component).from_config(dict(component.config))
        elif component.config is None:
            if ours is None:
                parts[component.name] = _make_processor(component)
            elif isinstance(ours, torch.nn.Module):
                where = folder.path / component.name
                raise ModelError(
                    f"{folder.pipeline} needs a {component.name}, and {where} has no config.json",
                    hint="fetch the whole of the small files",
                )
        elif _is_model(ours, component):
            with _naming(component):
                model = _make_model(ours, component, device, dtype)
            parts[component.name] = finish(component.name, model) if finish else model
    for name in set(tiny.components) - {component.name for component in folder.components}:
        if isinstance(parts[name], torch.nn.Module):  # an optional one that this model lacks
            parts[name] = None
    kind: Any = getattr(diffusers, folder.pipeline)
    _lengthen(parts)
    pipe = kind(**parts)
    pipe.set_progress_bar_config(disable=True)
    return FullSizePipeline(pipe, recipe)


@contextlib.contextmanager
def _naming(component: Component) -> Iterator[None]:
    """Whatever a library says of a config that makes no sense, with the file that it is in."""
    try:
        yield
    except AnyaccelError:
        raise
    except Exception as error:
        raise ModelError(
            f"{component.name} cannot be built from {component.file}: {type(error).__name__}: {error}",
            hint="compare that file with the one that was published; ANYACCEL_TRACEBACK=1 shows where",
        ) from error


def build_components(components: Iterable[Component], device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Models and schedulers alone, each from its config, with random weights."""
    made: dict[str, Any] = {}
    for component in components:
        if component.name == "scheduler":
            made[component.name] = _find_class(component).from_config(dict(component.config or {}))
        else:
            made[component.name] = _make_model(None, component, device, dtype)
    return made


def _is_model(ours: Any, component: Component) -> bool:
    if ours is not None:
        return isinstance(ours, torch.nn.Module)
    kind = _find_class(component)
    return isinstance(kind, type) and issubclass(kind, torch.nn.Module)


def _make_model(ours: Any, component: Component, device: str, dtype: torch.dtype) -> Any:
    kind = type(ours) if ours is not None and is_a(ours, component) else _find_class(component)
    config = dict(component.config or {})
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device), torch.no_grad():
            if hasattr(kind, "config_class") and kind.config_class is not None:  # transformers
                settings = {
                    name: value for name, value in config.items() if name not in _NO_SETTINGS and name[0] != "_"
                }
                model = kind(kind.config_class(**settings))
            else:
                model = kind.from_config(config)
    finally:
        torch.set_default_dtype(before)
    # Not through `to` of diffusers, which advises on modules that stay in float32.
    return torch.nn.Module.to(model, dtype).eval()


def _make_processor(component: Component) -> Any:
    """What prepares pictures for an encoder, with its own defaults; tokenizers are the recipe's."""
    if not component.kind.endswith(("ImageProcessor", "FeatureExtractor")):
        return None
    return _find_class(component)()


def _find_class(component: Component) -> Any:
    """The class that an index names: of a library, or of a pipeline's own folder in diffusers."""
    for module in (component.library, f"diffusers.pipelines.{component.library}"):
        try:
            found = getattr(importlib.import_module(module), component.kind, None)
        except ImportError:
            continue
        if found is not None:
            return found
    raise ModelError(
        f"{component.name} is a {component.kind} of {component.library}, which cannot be imported",
        hint="a newer diffusers or transformers may have it; code that comes with a model is not run",
    )


def _lengthen(parts: dict[str, Any]) -> None:
    """Let each tokenizer take as many tokens as the encoder of the same name has places for."""
    for name, part in parts.items():
        if not name.startswith("tokenizer"):
            continue
        encoder = parts.get(name.replace("tokenizer", "text_encoder"))
        places = getattr(getattr(encoder, "config", None), "max_position_embeddings", None)
        if places is not None and hasattr(part, "model_max_length"):
            part.model_max_length = min(places, max(part.model_max_length, 77))
