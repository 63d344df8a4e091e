"""The index of a modular pipeline, `modular_model_index.json`, as diffusers 0.42.1 writes and reads it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyaccel.errors import ModelFileError

__all__ = ["MODULAR_INDEX", "IndexEntry", "is_modular_folder", "read_modular_index"]

MODULAR_INDEX = "modular_model_index.json"
_PLAIN_INDEX = "model_index.json"


@dataclass(frozen=True, kw_only=True)
class IndexEntry:
    """A component in the index, with the place of its files."""

    name: str
    library: str | None
    """None if the class is found in the component's own config."""
    kind: str | None
    """The class name."""
    repository: str | None
    """Folder or Hub ID; None if the component has to be passed by the user."""
    subfolder: str
    folder: Path | None
    """Folder of its files; None if they are on the Hub or if there are none."""


def is_modular_folder(folder: Path) -> bool:
    """Return whether a folder contains a modular pipeline and no plain one."""
    return (folder / MODULAR_INDEX).is_file() and not (folder / _PLAIN_INDEX).is_file()


def read_modular_index(folder: Path) -> tuple[dict[str, IndexEntry], dict[str, Any]]:
    """Return the components and the other values of the index in a folder.

    Raise `ModelFileError` if the index cannot be read.
    """
    file = folder / MODULAR_INDEX
    try:
        content = dict(json.loads(file.read_text(encoding="utf-8")))
        # modular_pipelines/modular_pipeline.py, `_component_spec_to_dict`: [library, class, loading options]
        components = {name: value for name, value in content.items() if isinstance(value, list) and len(value) == 3}
        entries = {name: _read_entry(folder, name, dict(options)) for name, (_, _, options) in components.items()}
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise ModelFileError(f"cannot read {file}: {error}", hint="copy or download the file again") from error
    return entries, {name: value for name, value in content.items() if name not in entries}


def _read_entry(folder: Path, name: str, options: dict[str, Any]) -> IndexEntry:
    library, kind = options["type_hint"]
    repository, subfolder = options.get("pretrained_model_name_or_path"), options.get("subfolder") or ""
    return IndexEntry(
        name=name,
        library=library,
        kind=kind,
        repository=repository,
        subfolder=subfolder,
        folder=_find_folder(folder, repository, subfolder),
    )


def _find_folder(folder: Path, repository: str | None, subfolder: str) -> Path | None:
    """Return the local folder of a component's files, or None."""
    # A copy of the pipeline's folder keeps its index, which refers to the original; diffusers prefers the files in the
    # copy (`_is_local_component`). An empty subfolder is the folder of the pipeline itself.
    copied = folder / subfolder
    if subfolder and copied.is_dir() and any(copied.iterdir()):
        return copied
    original = None if repository is None else Path(repository).expanduser() / subfolder
    return original if original is not None and original.is_dir() else None
