"""Loading of modular pipelines, which diffusers creates without their components."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.utils import logging as diffusers_logging

from anyaccel.errors import ModelError, ModelFileError, UnknownComponentError, UsageError, first_line, nearest
from anyaccel.library_logging import drop_log_records
from anyaccel.runtime.custom_pipelines import check_custom_blocks, describe_code_error
from anyaccel.runtime.loading_errors import call_diffusers
from anyaccel.runtime.model_file_checks import check_weights
from anyaccel.runtime.weight_files.checks import check_weight_file
from anyaccel.runtime.weight_files.moving import LoadTarget, make_mover
from anyaccel.upstream.diffusers_internals import COMPONENTS_BAR, read_dtype_argument
from anyaccel.upstream.diffusers_loading import list_component_specs, read_absent_components, recording_component_errors
from anyaccel.upstream.modular_blocks import list_workflows
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
    pipe = _create_pipeline(model, {**creation, "trust_remote_code": bool(remaining.get("trust_remote_code"))})
    specs = list_component_specs(pipe)
    names = remaining.pop("names", None)
    # With those that are created from a config, such as the guider.
    passed = {name: remaining.pop(name) for name in [*pipe.components, *pipe.config] if name in remaining}
    pipe.update_components(**passed)
    hub = {name: value for name, value in creation.items() if name in _HUB_OPTIONS}
    absent = read_absent_components(pipe, **hub, revision=creation.get("revision"))
    loaded = _choose_names(names, specs, {*passed, *absent}, set(pipe.components) - set(specs))
    _load_components(pipe, loaded, remaining | hub, target)
    return pipe


def _create_pipeline(model: str, options: Mapping[str, Any]) -> Any:
    """Return the pipeline without its components."""
    create = functools.partial(call_diffusers, diffusers.ModularPipeline.from_pretrained, model)
    workflow = options.get("workflow")
    try:
        return create(dict(options))
    except Exception as error:
        if options["trust_remote_code"]:
            folder = Path(model).expanduser()
            check_custom_blocks(folder)
            cause = describe_code_error(error, folder)
            if cause:
                raise ModelError(f"the code of the blocks in {model} failed: {cause}", hint="fix the file") from error
        if workflow is not None:
            workflows = list_workflows(create({**options, "workflow": None}))
            if workflow not in workflows:
                hint = nearest(str(workflow), workflows) if workflows else "omit workflow="
                raise UsageError(f"the pipeline has no workflow {workflow!r}", hint=hint) from error
        if not isinstance(error, TypeError):
            raise
        code = " and the code of its blocks" if options["trust_remote_code"] else ""
        raise ModelError(f"cannot load {model}: {error}", hint=f"check its {MODULAR_INDEX}{code}") from error


def _choose_names(names: Any, specs: Mapping[str, Any], passed: Collection[str], created: Collection[str]) -> list[str]:
    """Return the components to load, in the order of the blocks; those in `created` are not loaded from files."""
    if names is None:
        return [name for name, spec in specs.items() if spec.pretrained_model_name_or_path and name not in passed]
    requested = [names] if isinstance(names, str) else list(names)
    for name in requested:
        if name in created:
            raise UsageError(
                f"names= contains {name}, which is not loaded but created from a config",
                hint=f"omit the name; to replace the component, pass it: from_pretrained(…, {name}=component)",
            )
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
    _check_files(folders.values(), pickles=options.get("use_safetensors") is False)
    with recording_component_errors() as errors, drop_log_records(_LOGGER, "Failed to"):
        # A bar like that of `DiffusionPipeline.from_pretrained`.
        for name, _ in diffusers_logging.tqdm([(name, specs[name]) for name in names], desc=f"{COMPONENTS_BAR}..."):
            pipe.load_components(names=[name], **by_model)
            if name in errors:
                raise _make_component_error(name, folders[name], errors[name], options) from errors[name]
            if mover is not None:
                mover.move(name, getattr(pipe, name), folders, options.get("variant"))


def _find_folder(spec: Any) -> Path:
    """Return the folder of a component; if it is in a repository, a relative path that starts with its name."""
    return Path(str(spec.pretrained_model_name_or_path)).expanduser() / (spec.subfolder or "")


def _check_files(paths: Iterable[Path], *, pickles: bool) -> None:
    """Check the weights of components before the first one is loaded; a component can also be a file of weights."""
    for path in paths:
        if path.is_dir():
            check_weights(path, pickles=pickles)
        elif path.is_file():
            check_weight_file(path, pickles=pickles)


def _is_model(spec: Any) -> bool:
    return spec.type_hint is None or issubclass(spec.type_hint, torch.nn.Module)


def _make_component_error(name: str, folder: Path, error: Exception, options: Collection[str]) -> UsageError:
    unknown = next((option for option in options if f"unexpected keyword argument {option!r}" in str(error)), None)
    if unknown is not None:
        return UsageError(f"the component {name} has no option {unknown!r}", hint="omit it, or correct its name")
    is_missing = folder.is_absolute() and not folder.exists()
    message = "this folder does not exist" if is_missing else first_line(error)
    return ModelFileError(
        f"cannot load the component {name} from {folder}: {message}",
        hint=f"copy or download it again, or change its path in {MODULAR_INDEX}; to load the pipeline without it, pass "
        f"{name}=None",
    )
