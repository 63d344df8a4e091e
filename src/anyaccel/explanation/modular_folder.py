"""Reader for the folder of a modular pipeline: its blocks and the configs of its components, without the weights."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.explanation.known_models import find_bundled_configs
from anyaccel.recipes import Recipe
from anyaccel.runtime.loading_errors import call_diffusers
from anyaccel.runtime.model_file_checks import INDEXES
from anyaccel.tracing.model_folder import Component, ModelFolder, read_json
from anyaccel.upstream.diffusers_loading import list_component_specs

__all__ = ["choose_blocks", "describe_blocks", "make_empty_pipeline", "read_modular_folder"]

_CONFIGS = ("config.json", "scheduler_config.json", "guider_config.json")


def make_empty_pipeline(path: Path) -> Any:
    """Return the modular pipeline of a folder without its components."""
    import diffusers

    return call_diffusers(diffusers.ModularPipeline.from_pretrained, str(path), {})


def choose_blocks(blocks: Any, base: Recipe) -> Any:
    """Return the blocks of the recipe if they have the class of the folder's blocks, otherwise the folder's.

    Some recipes leave out the text encoder, because their call passes prompt embeddings.
    """
    tiny: Any = base.make()
    return tiny.blocks if type(tiny.blocks) is type(blocks) else blocks


def describe_blocks(path: Path, base: Recipe) -> list[str]:
    """Return a note if the recipe leaves out blocks of the folder."""
    blocks: Any = make_empty_pipeline(path).blocks
    used = choose_blocks(blocks, base).sub_blocks
    left_out = [name for name in blocks.sub_blocks if name not in used]
    return [f"the recipe leaves out the blocks {', '.join(left_out)}"] if left_out else []


def read_modular_folder(path: Path) -> ModelFolder:
    """Read the index of a modular pipeline and the configs of its components; weight files are not opened."""
    pipe = make_empty_pipeline(path)
    # A component without a folder or repository is not loaded: the index has it only because a block can use it.
    specs = {name: spec for name, spec in list_component_specs(pipe).items() if spec.pretrained_model_name_or_path}
    folders = {name: _find_folder(path, spec) for name, spec in specs.items()}
    components = [
        _read_component(name, spec, folders[name]) for name, spec in specs.items() if spec.type_hint is not None
    ]
    if not components:
        raise ModelError(
            f"{path / INDEXES[1]} names no folder or repository for any component",
            hint="load the components, then save the pipeline again with save_pretrained",
        )
    settings = {name: value for name, value in pipe.config.items() if not name.startswith("_")}
    return ModelFolder(
        path=path,
        pipeline=type(pipe).__name__,
        components=tuple(components),
        switches={name: value for name, value in settings.items() if name not in pipe.components},
        folders=folders,
        make_empty=functools.partial(_make_pipeline_to_trace, path),
    )


def _make_pipeline_to_trace(path: Path, base: Recipe) -> Any:
    """Return the pipeline of a folder without its components, with blocks that accept the call of the recipe."""
    pipe = make_empty_pipeline(path)
    return type(pipe)(blocks=choose_blocks(pipe.blocks, base), pretrained_model_name_or_path=str(path))


def _find_folder(path: Path, spec: Any) -> Path:
    """Return the folder of a component's config."""
    # The folder may be a repository whose configs are included in the package; nothing is downloaded.
    source, subfolder = str(spec.pretrained_model_name_or_path), spec.subfolder or ""
    folder = (find_bundled_configs(source) or Path(source).expanduser()) / subfolder
    # The index of a repository names the repository itself, of which only the configs have been downloaded.
    return folder if folder.is_dir() or not subfolder else path / subfolder


def _read_component(name: str, spec: Any, folder: Path) -> Component:
    file = next((folder / config for config in _CONFIGS if (folder / config).is_file()), None)
    config = None if file is None else read_json(file)
    library, _, _ = spec.type_hint.__module__.partition(".")
    return Component(name=name, library=library, kind=spec.type_hint.__name__, config=config, file=file)
