"""Loading of modular pipelines, which diffusers creates without their components."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.utils import logging as diffusers_logging

from anyaccel.errors import ModelError, ModelFileError, UnknownComponentError, first_line, nearest
from anyaccel.library_logging import drop_log_records
from anyaccel.runtime.custom_pipelines import check_custom_blocks
from anyaccel.runtime.loading_errors import call_diffusers
from anyaccel.runtime.weight_files.moving import LoadTarget, make_mover
from anyaccel.upstream.diffusers_internals import COMPONENTS_BAR, read_dtype_argument
from anyaccel.upstream.diffusers_loading import list_component_specs, read_absent_components, recording_component_errors
from anyaccel.upstream.modular_index import MODULAR_INDEX, is_modular_folder

__all__ = ["create_modular_pipeline", "is_modular", "load_modular_pipeline"]

_DTYPE = read_dtype_argument()
_LOGGER = "diffusers.modular_pipelines.modular_pipeline"
_HUB_OPTIONS = ("cache_dir", "force_download", "proxies", "token", "local_files_only")
_CREATION_OPTIONS = (*_HUB_OPTIONS, "revision", "components_manager", "collection", "workflow")


def is_modular(kind: Any, model: Any) -> bool:
    """Return whether a model is to be loaded as a modular pipeline: its class is one, or the folder has only its index.

    Raise `ModelError` if an auto class is used for such a folder.
    """
    if isinstance(kind, type) and issubclass(kind, diffusers.ModularPipeline):
        return True
    folder = Path(str(model)).expanduser()
    if not is_modular_folder(folder):
        return False
    if kind is not diffusers.DiffusionPipeline:
        raise ModelError(
            f"{kind.__name__} cannot load {model}, which contains a modular pipeline",
            hint="use anyaccel.ModularPipeline.from_pretrained; its call arguments select the task",
        )
    return True


def create_modular_pipeline(folder: str) -> Any:
    """Create the modular pipeline of a folder without its components, to read the inputs and outputs of its blocks."""
    return call_diffusers(diffusers.ModularPipeline.from_pretrained, folder, {"trust_remote_code": False})


def load_modular_pipeline(model: str, options: Mapping[str, Any], target: LoadTarget | None) -> Any:
    """Load a modular pipeline with its components: those of `names=`, or all that have a folder or repository.

    `options` are those of diffusers' `ModularPipeline.from_pretrained` and `load_components`, and components or config
    values by name. With a target, each component is moved to this device before the next one is loaded.
    """
    remaining = dict(options)
    creation = {name: remaining.pop(name) for name in _CREATION_OPTIONS if name in remaining}
    trusted = bool(remaining.get("trust_remote_code"))
    try:
        pipe = call_diffusers(
            diffusers.ModularPipeline.from_pretrained, model, {**creation, "trust_remote_code": trusted}
        )
    except Exception:
        if trusted:
            check_custom_blocks(Path(model).expanduser())
        raise
    specs = list_component_specs(pipe)
    names = remaining.pop("names", None)
    # With those that are created from a config, such as the guider.
    passed = {name: remaining.pop(name) for name in [*pipe.components, *pipe.config] if name in remaining}
    pipe.update_components(**passed)
    hub = {name: value for name, value in creation.items() if name in _HUB_OPTIONS}
    absent = read_absent_components(pipe, **hub, revision=creation.get("revision"))
    loaded = _choose_names(names, specs, {*passed, *absent})
    _load_components(pipe, loaded, remaining | hub, target)
    return pipe


def _choose_names(names: Any, specs: Mapping[str, Any], passed: Collection[str]) -> list[str]:
    """Return the components to load, in the order of the blocks."""
    if names is None:
        return [name for name, spec in specs.items() if spec.pretrained_model_name_or_path and name not in passed]
    requested = [names] if isinstance(names, str) else list(names)
    for name in requested:
        if name not in specs:
            raise UnknownComponentError(f"the pipeline has no component {name!r}", hint=nearest(name, specs))
        if not specs[name].pretrained_model_name_or_path:
            raise ModelError(
                f"{MODULAR_INDEX} names no folder or repository for the component {name}",
                hint=f"load it with diffusers and pass it: from_pretrained(…, {name}=model)",
            )
    return [name for name in specs if name in requested]


def _load_components(pipe: Any, names: list[str], options: dict[str, Any], target: LoadTarget | None) -> None:
    specs = list_component_specs(pipe)
    # Tokenizers and processors store the options that they do not know in their configs.
    models = [name for name in names if _is_model(specs[name])]
    by_model = {
        key: value if isinstance(value, dict) or key in _HUB_OPTIONS else dict.fromkeys(models, value)
        for key, value in options.items()
        if key != "trust_remote_code"
    }
    if options.get("trust_remote_code"):
        by_model["trust_remote_code"] = True
    mover = make_mover(target, options.get(_DTYPE))
    folders = {name: _find_folder(specs[name]) for name in names}
    with recording_component_errors() as errors, drop_log_records(_LOGGER, "Failed to"):
        # A bar like that of `DiffusionPipeline.from_pretrained`.
        for name, _ in diffusers_logging.tqdm([(name, specs[name]) for name in names], desc=f"{COMPONENTS_BAR}..."):
            pipe.load_components(names=[name], **by_model)
            if name in errors:
                raise _make_component_error(name, folders[name], errors[name]) from errors[name]
            if mover is not None:
                mover.move(name, getattr(pipe, name), folders, options.get("variant"))


def _find_folder(spec: Any) -> Path:
    """Return the folder of a component; if it is in a repository, a relative path that starts with its name."""
    return Path(str(spec.pretrained_model_name_or_path)).expanduser() / (spec.subfolder or "")


def _is_model(spec: Any) -> bool:
    return spec.type_hint is None or issubclass(spec.type_hint, torch.nn.Module)


def _make_component_error(name: str, folder: Path, error: Exception) -> ModelFileError:
    is_missing = folder.is_absolute() and not folder.exists()
    message = "this folder does not exist" if is_missing else first_line(error)
    return ModelFileError(
        f"cannot load the component {name} from {folder}: {message}",
        hint=f"copy or download it again, or change its path in {MODULAR_INDEX}; to load the pipeline without it, pass "
        f"{name}=None",
    )
