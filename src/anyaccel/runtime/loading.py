"""Load a pipeline with diffusers, safely by default, with errors that say what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch

from anyaccel.backends.device_functions import dtype_name, dtype_of
from anyaccel.errors import AnyaccelError, ModelError, UsageError, first_line
from anyaccel.planning.options import PlacementOptions
from anyaccel.runtime.model_files import check_model_folder, is_single_file
from anyaccel.upstream.diffusers_internals import casts_components, read_dtype_argument

__all__ = ["derive_pipeline", "load_pipeline"]

_DTYPE = read_dtype_argument()


def load_pipeline(kind: Any, model: Any, options: dict[str, Any]) -> tuple[Any, PlacementOptions]:
    """Load a pipeline with diffusers; return it with the placement options that it was loaded with.

    What diffusers raises about a model becomes a `ModelError` with a hint.
    """
    options, placement_options = _read_options(options)
    if not isinstance(model, str | Path):
        raise UsageError(f"{model!r} is no model", hint="give a hub id, a local folder or a file of weights")
    if not options.get("trust_remote_code") and options.get("custom_pipeline") is not None:
        raise ModelError(
            f"custom_pipeline={options['custom_pipeline']!r} would run code that comes with a model",
            hint="read that code, and pass trust_remote_code=True if you trust it",
        )
    single = is_single_file(model)
    check_model_folder(model, pickles=not options["use_safetensors"], trusted=bool(options.get("trust_remote_code")))
    loader = _find_single_file_loader(kind, options) if single else kind.from_pretrained
    if single:
        options.pop("use_safetensors")
    return _call_diffusers(loader, str(model), options), placement_options


def _read_options(options: dict[str, Any]) -> tuple[dict[str, Any], PlacementOptions]:
    """The options as diffusers takes them, and what they wish for."""
    options = dict(options)
    if options.get("dtype") is not None and options.get("torch_dtype") is not None:
        raise UsageError("dtype and torch_dtype are both given, and mean the same", hint="give one of them")
    asked = options.pop("dtype", None) or options.pop("torch_dtype", None)
    options.pop("torch_dtype", None)
    if asked is not None and not isinstance(asked, dict):
        asked = dtype_of(dtype_name(asked))
    if asked is not None:
        options[_DTYPE] = asked
    if options.get("use_safetensors") is None:
        options["use_safetensors"] = True
    chosen = str(asked).removeprefix("torch.") if isinstance(asked, torch.dtype) else None
    return options, PlacementOptions(dtype=chosen)


def _find_single_file_loader(kind: Any, options: dict[str, Any]) -> Callable[..., Any]:
    """The class that a single file is loaded by: this one, or the one that its description names."""
    if hasattr(kind, "from_single_file") and kind is not diffusers.DiffusionPipeline:
        loader: Callable[..., Any] = kind.from_single_file
        return loader
    described = options.get("config")
    if described is None:
        raise ModelError(
            "a single file holds weights, and not which pipeline they are for",
            hint="pass config= a folder or hub id of the same architecture, such as stable-diffusion-v1-5/"
            "stable-diffusion-v1-5, or use the pipeline's own class and anyaccel.place",
        )
    config = _call_diffusers(diffusers.DiffusionPipeline.load_config, str(described), {})
    found = getattr(diffusers, str(config.get("_class_name")), None)
    if found is None or not hasattr(found, "from_single_file"):
        raise ModelError(
            f"{config.get('_class_name')} cannot be loaded from a single file", hint="load it from a folder"
        )
    return found.from_single_file  # type: ignore[no-any-return]


def _call_diffusers(function: Callable[..., Any], model: str, options: dict[str, Any]) -> Any:
    """Call diffusers, and turn what it raises about a model into an error with a hint."""
    try:
        return function(model, **options)
    except AnyaccelError:
        raise
    except (OSError, ValueError, KeyError, AttributeError) as error:
        words = first_line(error)
        offline = "is it spelled right, and is the network or the cache there?"
        hint = f"look into {model}" if Path(model).exists() else f"{model}: {offline}"
        raise ModelError(f"{model} cannot be loaded: {words}", hint=hint) from error


def derive_pipeline(kind: Any, pipeline: Any, options: dict[str, Any]) -> tuple[Any, PlacementOptions]:
    """Make a pipeline from another one's components, in their dtype unless the options have one."""
    options, placement_options = _read_options(options)
    del options["use_safetensors"]
    if _DTYPE not in options and casts_components(kind):
        # diffusers would cast the components, which the other pipeline still uses, to float32.
        options[_DTYPE] = pipeline.dtype
    return kind.from_pipe(pipeline, **options), placement_options
