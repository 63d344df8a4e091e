"""The folder for what is kept between runs, and small facts in it that were measured once on this machine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

__all__ = ["CACHE_VARIABLE", "find_cache_folder", "keep_fact", "read_fact"]

CACHE_VARIABLE = "ANYACCEL_CACHE"


def find_cache_folder() -> Path:
    """The folder for what is kept between runs: `ANYACCEL_CACHE`, or one in the user's own cache folder."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "anyaccel"


def read_fact(file: str, key: str) -> Any:
    """What was measured before under a key; None where nothing was, or it cannot be read."""
    return _read(find_cache_folder() / file).get(key)


def keep_fact(file: str, key: str, fact: Any) -> None:
    """Keep what was measured, whole or not at all; a folder that cannot be written costs it at the next start."""
    path = find_cache_folder() / file
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps({**_read(path), key: fact}, indent=1) + "\n")
        draft.replace(path)
    except OSError:
        return


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
