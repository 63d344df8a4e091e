"""Config files of well-known models, so that they can be asked about offline: a folder each, under its hub id.

They hold sizes, switches and class names, and no weights. They were written by hand and held against what is published
of the files on the hub. `weights.json` says how many bytes the files of weights have there, and at which revision.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["described_models", "find_description"]

_FOLDER = Path(__file__).parent
_INDEX = "model_index.json"


def described_models() -> list[str]:
    """The hub ids that there is a description of: `stabilityai/sdxl-turbo`."""
    return sorted(path.parent.relative_to(_FOLDER).as_posix() for path in _FOLDER.glob(f"*/*/{_INDEX}"))


def find_description(model: str) -> Path | None:
    """The folder of a model's config files, by its hub id; None if there is none."""
    known = {name.lower(): name for name in described_models()}
    name = known.get(model.lower())
    return None if name is None else _FOLDER / name
