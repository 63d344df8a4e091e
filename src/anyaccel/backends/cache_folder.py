"""The folder for what is kept between runs, and small facts in it that were measured once on this machine."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

__all__ = [
    "CACHE_VARIABLE",
    "find_cache_folder",
    "find_graphs_folder",
    "find_write_fault",
    "keep_fact",
    "read_fact",
    "tell_write_fault",
]

CACHE_VARIABLE = "ANYACCEL_CACHE"
_LOG = logging.getLogger("anyaccel")
_TOLD: set[Path] = set()
"""The folders of which it was said that they cannot be written."""


def find_cache_folder() -> Path:
    """The folder for what is kept between runs: `ANYACCEL_CACHE`, or one in the user's own cache folder."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "anyaccel"


def find_graphs_folder() -> Path:
    """Where compilers write what they keep themselves: a folder for each backend."""
    return find_cache_folder() / "graphs"


def find_write_fault(folder: Path) -> str:
    """Why nothing can be written into a folder, which is made if it is not there; empty where it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        there = next((path for path in (folder, *folder.parents) if os.path.lexists(path)), folder)
        if not os.path.isdir(there):
            return f"{there} is no folder"
        return f"{folder} cannot be written: {error.strerror or error}"


def tell_write_fault(fault: str) -> None:
    """Warn, once for each cache folder, that what is compiled is not kept."""
    folder = find_cache_folder()
    if folder not in _TOLD:
        _TOLD.add(folder)
        _LOG.warning("anyaccel: what is compiled is not kept for later processes: %s; see %s", fault, CACHE_VARIABLE)


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
