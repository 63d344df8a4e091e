"""Pipeline loading with diffusers, with safe defaults and with hints in error messages."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
from huggingface_hub import hf_hub_download

from anyaccel.backends.device_functions import dtype_name, dtype_of
from anyaccel.embedded.motion import is_motion_module, load_video_pipeline, read_video_index
from anyaccel.errors import ModelError, UsageError
from anyaccel.planning.options import PlacementOptions
from anyaccel.runtime.custom_pipelines import check_class_name, find_custom_file, load_custom_class
from anyaccel.runtime.loading_errors import call_diffusers
from anyaccel.runtime.model_file_checks import check_model_folder, check_weights, is_single_file
from anyaccel.runtime.modular_loading import is_modular, load_modular_pipeline
from anyaccel.runtime.placement_state import find_placement
from anyaccel.runtime.weight_files.loading import (
    check_component_options,
    find_component_files,
    find_denoiser,
    keep_file_weights,
    load_component,
)
from anyaccel.runtime.weight_files.moving import LoadTarget, moving_components
from anyaccel.upstream.diffusers_internals import casts_components, read_dtype_argument

__all__ = ["derive_pipeline", "find_pipeline_class", "keep_dtype", "load_pipeline"]

_DTYPE = read_dtype_argument()


def load_pipeline(
    kind: Any, model: Any, options: dict[str, Any], target: LoadTarget | None = None
) -> tuple[Any, PlacementOptions]:
    """Load a pipeline with diffusers; return it with the placement options derived from `options`.

    With a target, each component is moved to this device before the next one is loaded, if all of them fit there.
    Diffusers errors about the model are reraised as `ModelError` with a hint.
    """
    options, placement_options = _read_options(options)
    if not isinstance(model, str | Path):
        hint = "pass a Hub ID, a folder or a single-file checkpoint"
        raise UsageError(f"the model must be a string or a Path, not {model!r:.60}", hint=hint)
    if not options.get("trust_remote_code") and options.get("custom_pipeline") is not None:
        raise ModelError(
            f"custom_pipeline={options['custom_pipeline']!r} would run code from the model repository",
            hint="review the code, then pass trust_remote_code=True",
        )
    if is_motion_module(model):
        load = functools.partial(_load_with_motion, options=options)
        return call_diffusers(load, str(model), {}), placement_options
    single = is_single_file(model)
    # Before anything is loaded: a truncated file or a pickle must not be found after gigabytes have been read.
    check_model_folder(model, pickles=not options["use_safetensors"], trusted=bool(options.get("trust_remote_code")))
    if is_modular(kind, model):
        return load_modular_pipeline(str(model), options, target), placement_options
    return _load_files(kind, str(model), options, target, single=single), placement_options


def _load_with_motion(folder: str, options: dict[str, Any]) -> Any:
    """Load the embedded model with a motion module."""
    check_weights(Path(folder).expanduser(), pickles=False)
    return load_video_pipeline(Path(folder).expanduser(), **options)


def _load_files(kind: Any, model: str, options: dict[str, Any], target: LoadTarget | None, *, single: bool) -> Any:
    """Load a pipeline, with 8-bit weights in their format and with the components that come from files."""
    file = find_custom_file(options["custom_pipeline"]) if options.get("custom_pipeline") is not None else None
    if file is not None:
        kind = load_custom_class(file)
        del options["custom_pipeline"]
    files = find_component_files(options)
    passes_models = any(isinstance(value, torch.nn.Module) for value in options.values())
    needed = bool(files) or passes_models or "config" in options
    config = _read_config(str(options.get("config")) if single else model, needed=needed)
    check_component_options(options, config)
    denoiser = find_denoiser(Path(model), config) if single and Path(model).is_file() else ""
    if denoiser:  # the other models come from the folder
        files[denoiser], single, model = Path(model), False, str(options.pop("config"))
        kind = kind if hasattr(kind, "from_pretrained") else diffusers.DiffusionPipeline
    for name, file in files.items():
        load = functools.partial(load_component, name=name, model=model, config=config, options=options)
        options[name] = call_diffusers(load, str(file), {})
    loader = (
        _find_single_file_loader(kind, options) if single else _find_class(kind, model, config, options).from_pretrained
    )
    if single:
        options.pop("use_safetensors")  # the file's suffix decides
    with (
        keep_file_weights(model, config, options) as (finish, kept),
        moving_components(target, options.get(_DTYPE), kept),
    ):
        pipe = call_diffusers(loader, model, options)
        finish(pipe)
    return pipe


def _find_class(kind: Any, model: str, config: dict[str, Any], options: dict[str, Any]) -> Any:
    """Return the pipeline class of a folder if `kind` is the base class and the class is one of diffusers.

    The base class ignores components that its subclasses declare as optional, such as Wan's transformer
    (`_get_signature_keys` in pipelines/pipeline_utils.py, diffusers 0.42.1).
    """
    if kind is not diffusers.DiffusionPipeline or options.get("custom_pipeline") is not None:
        return kind
    if config:
        check_class_name(config.get("_class_name"), model)
    found = getattr(diffusers, str(config.get("_class_name")), None)
    return found if isinstance(found, type) and issubclass(found, kind) else kind


def find_pipeline_class(model: str, revision: str | None = None) -> tuple[Any, dict[str, str], dict[str, Any]]:
    """Return the class of a model's pipeline, the class names of its components and its settings, without loading it.

    The class is None if it is not one of diffusers. For a Hub ID, this downloads the index.
    """
    if is_single_file(model):
        return None, {}, {}
    options: dict[str, Any] = {} if revision is None else {"revision": revision}
    config = _read_config(model, needed=False) or call_diffusers(_download_index, model, options)
    found = getattr(diffusers, str(config.get("_class_name")), None)
    if not (isinstance(found, type) and issubclass(found, diffusers.DiffusionPipeline)):
        return None, {}, {}
    entries = {name: entry for name, entry in config.items() if isinstance(entry, list) and len(entry) == 2}
    settings = {name: value for name, value in config.items() if name not in entries}
    return found, {name: str(kind) for name, (library, kind) in entries.items() if library is not None}, settings


def _download_index(model: str, revision: str | None = None) -> dict[str, Any]:
    """Return the index of a Hub model."""
    # Not `load_config` of diffusers, which passes deprecated arguments to huggingface_hub (diffusers 0.42).
    content = json.loads(Path(hf_hub_download(model, "model_index.json", revision=revision)).read_text())
    return content if isinstance(content, dict) else {}


def _read_config(source: str, *, needed: bool) -> dict[str, Any]:
    """Return the config of a pipeline; an empty one for a Hub ID unless it is needed, which may download it."""
    if is_motion_module(source):
        return read_video_index()
    file = Path(source).expanduser() / "model_index.json"
    if file.is_file():
        return dict(json.loads(file.read_text()))
    return dict(call_diffusers(diffusers.DiffusionPipeline.load_config, source, {})) if needed else {}


def _read_options(options: dict[str, Any]) -> tuple[dict[str, Any], PlacementOptions]:
    """Return the normalized options for diffusers, and the placement options derived from them."""
    options = dict(options)
    if options.get("dtype") is not None and options.get("torch_dtype") is not None:
        raise UsageError("dtype and torch_dtype cannot be used together", hint="pass only dtype")
    requested = options.pop("dtype", None) or options.pop("torch_dtype", None)
    options.pop("torch_dtype", None)
    # diffusers does not support "auto", and says so.
    if isinstance(requested, dict):  # one dtype per component
        requested = {name: dtype_of(dtype_name(dtype)) for name, dtype in requested.items()}
    elif requested is not None and requested != "auto":
        requested = dtype_of(dtype_name(requested))
    if requested is not None:
        options[_DTYPE] = requested
    if options.get("use_safetensors") is None:
        # The default of diffusers is to fall back to pickles, which can run code.
        options["use_safetensors"] = True
    # The loaded models have the requested dtypes already. A later `to` must not cast a model that was passed in another
    # dtype, such as a VAE in float32, or that the user has cast or replaced since.
    return options, PlacementOptions(keep_dtypes=requested is not None)


def _find_single_file_loader(kind: Any, options: dict[str, Any]) -> Callable[..., Any]:
    """Return `from_single_file` of this class, or of the pipeline class that `config=` refers to.

    Raise `ModelError` if neither class has this method.
    """
    if hasattr(kind, "from_single_file") and kind is not diffusers.DiffusionPipeline:
        loader: Callable[..., Any] = kind.from_single_file
        return loader
    source = options.get("config")
    if source is None:
        raise ModelError(
            "cannot determine the pipeline class: a single-file checkpoint contains only weights",
            hint="pass config= with the folder or Hub ID of a pipeline with the same architecture, such as "
            "config='stable-diffusion-v1-5/stable-diffusion-v1-5', or load the file with the diffusers pipeline class "
            "and call anyaccel.place(pipe)",
        )
    config = call_diffusers(diffusers.DiffusionPipeline.load_config, str(source), {})
    pipeline_class = getattr(diffusers, str(config.get("_class_name")), None)
    if pipeline_class is None or not hasattr(pipeline_class, "from_single_file"):
        raise ModelError(
            f"{config.get('_class_name')} cannot be loaded from a single-file checkpoint",
            hint="pass the folder or Hub ID of the pipeline instead of a file",
        )
    return pipeline_class.from_single_file  # type: ignore[no-any-return]


def derive_pipeline(kind: Any, pipeline: Any, options: dict[str, Any]) -> tuple[Any, PlacementOptions]:
    """Create a pipeline from another one's components, keeping their dtype unless the options set one."""
    options, placement_options = _read_options(options)
    del options["use_safetensors"]
    if find_placement(pipeline) is None:
        options = keep_dtype(kind, pipeline, options)
    return kind.from_pipe(pipeline, **options), placement_options


def keep_dtype(kind: Any, pipeline: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return options for diffusers' `from_pipe` that keep the dtype of the components, unless they set one."""
    # from_pipe casts the shared components to float32 by default:
    # https://github.com/huggingface/diffusers/issues/12754 (seen in diffusers 0.35).
    if casts_components(kind) and options.get("dtype") is None and options.get("torch_dtype") is None:
        return {**options, _DTYPE: pipeline.dtype}
    return options
