"""Config files for well-known models, one folder per Hub ID, so that `explain` works offline.

The folders contain configs but no weights. The files were written by hand and compared with the
published ones. `weights.json` contains the sizes of the weight files on the Hub and the
corresponding revision.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["find_bundled_configs", "list_bundled_models"]

_FOLDER = Path(__file__).parent
_INDEX = "model_index.json"


def list_bundled_models() -> list[str]:
    """Return the Hub IDs with bundled config files, for example `stabilityai/sdxl-turbo`."""
    return sorted(path.parent.relative_to(_FOLDER).as_posix() for path in _FOLDER.glob(f"*/*/{_INDEX}"))


def find_bundled_configs(model: str) -> Path | None:
    """Return the folder with the config files for a Hub ID, or None if they are not bundled."""
    # Ids match without regard to case, as on the hub.
    by_lower_case = {name.lower(): name for name in list_bundled_models()}
    name = by_lower_case.get(model.lower())
    return None if name is None else _FOLDER / name
