"""The drop-ins: diffusers' own classes, whose pipelines are portable and whose errors say what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch

from anyaccel.backends.device_functions import dtype_name, dtype_of
from anyaccel.errors import AnyaccelError, ModelError, UsageError, first_line
from anyaccel.planning.options import Wishes
from anyaccel.runtime.model_files import check_model_folder, is_single_file
from anyaccel.runtime.pipeline import Portable, inherit_placement, make_portable, plain_class
from anyaccel.runtime.placement_state import remember_wishes
from anyaccel.upstream.diffusers_internals import casts_components, name_dtype_argument

__all__ = [
    "AutoPipelineForImage2Image",
    "AutoPipelineForInpainting",
    "AutoPipelineForText2Image",
    "DiffusionPipeline",
]

_DTYPE = name_dtype_argument()


class DiffusionPipeline(Portable, diffusers.DiffusionPipeline):
    """`diffusers.DiffusionPipeline`, portable: loads any pipeline, and places it wherever it lands."""

    @classmethod
    def from_pretrained(cls, model: Any, **options: Any) -> Any:
        """Load a hub id, a local folder or a single file: `from_pretrained("org/name", dtype="bf16")`.

        Takes what diffusers takes. Weights are safetensors unless `use_safetensors=False`, and code that comes with a
        model runs only with `trust_remote_code=True`.
        """
        return _load(vars(cls).get("_plain_class", diffusers.DiffusionPipeline), model, options)

    @classmethod
    def from_single_file(cls, model: Any, **options: Any) -> Any:
        """Load one checkpoint file; `config=` names the folder or hub id that describes it."""
        return _load(vars(cls).get("_plain_class", diffusers.DiffusionPipeline), model, options)

    @classmethod
    def from_pipe(cls, pipeline: Any, **options: Any) -> Any:
        """A pipeline of this class from another one's components, on the same device."""
        return _derive(vars(cls).get("_plain_class", plain_class(pipeline)), pipeline, options)


class _AutoPipeline:
    """Finds the pipeline for a task, as diffusers' class of the same name does, and makes it portable."""

    def __init__(self) -> None:
        raise UsageError(
            f"{type(self).__name__} is not made by itself", hint=f"{type(self).__name__}.from_pretrained(model)"
        )

    @classmethod
    def from_pretrained(cls, model: Any, **options: Any) -> Any:
        """Load a hub id or a local folder for this task."""
        return _load(getattr(diffusers, cls.__name__), model, options)

    @classmethod
    def from_pipe(cls, pipeline: Any, **options: Any) -> Any:
        """The pipeline for this task from another one's components, on the same device."""
        return _derive(getattr(diffusers, cls.__name__), pipeline, options)


class AutoPipelineForText2Image(_AutoPipeline):
    """`diffusers.AutoPipelineForText2Image`, portable."""


class AutoPipelineForImage2Image(_AutoPipeline):
    """`diffusers.AutoPipelineForImage2Image`, portable."""


class AutoPipelineForInpainting(_AutoPipeline):
    """`diffusers.AutoPipelineForInpainting`, portable."""


def _load(kind: Any, model: Any, options: dict[str, Any]) -> Any:
    """Load by diffusers, portable; what goes wrong is an error of our tree."""
    options, wishes = _read_options(options)
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
    pipe = make_portable(_call_diffusers(loader, str(model), options))
    remember_wishes(pipe, wishes)
    return pipe


def _read_options(options: dict[str, Any]) -> tuple[dict[str, Any], Wishes]:
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
    return options, Wishes(dtype=chosen)


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


def _derive(kind: Any, pipeline: Any, options: dict[str, Any]) -> Any:
    """A pipeline from another's components; their type stays as it is unless another is asked for."""
    options, wishes = _read_options(options)
    del options["use_safetensors"]
    if _DTYPE not in options and casts_components(kind):
        # diffusers would cast the components, which the other pipeline still uses, to float32.
        options[_DTYPE] = pipeline.dtype
    made = make_portable(kind.from_pipe(pipeline, **options))
    remember_wishes(made, wishes)
    inherit_placement(made, pipeline)
    return made
