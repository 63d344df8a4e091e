"""Functions for the cache directory and the measurements stored in it."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from anyaccel.storage.atomic_write import atomic_write

__all__ = [
    "CACHE_VARIABLE",
    "find_cache_folder",
    "find_graphs_folder",
    "find_write_error",
    "read_fact",
    "remove_facts",
    "remove_files",
    "store_fact",
    "warn_not_cached",
]

CACHE_VARIABLE = "ANYACCEL_CACHE"
# The files of `store_fact`.
_FACT_FILES = ("half_precision.json",)
_LOG = logging.getLogger("anyaccel")
# The cache directories that a warning was logged for.
_WARNED: set[Path] = set()


def find_cache_folder() -> Path:
    """Return the cache directory: `$ANYACCEL_CACHE`, or else `anyaccel` in the user's cache directory."""
    value = os.environ.get(CACHE_VARIABLE)
    if value:
        return Path(value).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "anyaccel"


def find_graphs_folder() -> Path:
    """Return the directory for the compilers' own caches, with one subdirectory per backend."""
    return find_cache_folder() / "graphs"


def find_write_error(folder: Path) -> str:
    """Create a directory if necessary; return why it is not writable, or an empty string if it is."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Creating a file is the only reliable check: os.access does not consider quotas and network mounts.
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        # If a parent is a file, the error message is a misleading "not a directory" or "file exists".
        existing = next((path for path in (folder, *folder.parents) if os.path.lexists(path)), folder)
        if not os.path.isdir(existing):
            return f"{existing} is not a folder"
        return f"cannot write to {folder}: {error.strerror or error}"


def warn_not_cached(fault: str) -> None:
    """Log a warning that compiled code cannot be cached, at most once per cache directory."""
    folder = find_cache_folder()
    if folder not in _WARNED:
        _WARNED.add(folder)
        _LOG.warning("anyaccel: compiled code is not cached: %s; set %s to a writable folder", fault, CACHE_VARIABLE)


def read_fact(file: str, key: str) -> Any:
    """Return a measurement from a file in the cache directory, or None if it is missing or unreadable."""
    return _read(find_cache_folder() / file).get(key)


def store_fact(file: str, key: str, fact: Any) -> None:
    """Store a measurement in a file in the cache directory; do nothing if the file cannot be written."""
    path = find_cache_folder() / file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Of two concurrent writes one can be lost; the value is then measured again.
        atomic_write(path, json.dumps({**_read(path), key: fact}, indent=1) + "\n")
    except OSError:
        return


def remove_facts() -> int:
    """Remove the files with measurements from the cache directory; return the number of removed files."""
    return remove_files(find_cache_folder() / name for name in _FACT_FILES)


def remove_files(paths: Iterable[Path]) -> int:
    """Remove files; return how many were removed. Files that do not exist or cannot be removed are skipped."""
    removed = 0
    for path in paths:
        with suppress(OSError):
            path.unlink()
            removed += 1
    return removed


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
