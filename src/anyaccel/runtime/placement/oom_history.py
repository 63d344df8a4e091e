"""Memory settings with which out-of-memory retries succeeded, persisted across processes."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from anyaccel.planning.footprint import MemorySavings
from anyaccel.planning.memory import MemoryRule
from anyaccel.storage.atomic_write import atomic_write
from anyaccel.storage.cache_dir import find_cache_folder, remove_files

__all__ = ["has_outcome", "load_outcome", "remove_outcomes", "save_outcome"]

# A stored outcome is ignored if the capacity has since grown by more than this factor.
_MARGIN = 1.02
_FILE_NAME = re.compile(r"[0-9a-f]{24}\.json")
# Rule and capacity in bytes of each key, for this process.
_OUTCOMES: dict[str, tuple[MemoryRule, int]] = {}


def save_outcome(key: str, rule: MemoryRule, capacity_bytes: int | None) -> None:
    """Store the memory settings with which a call succeeded, in this process and, if possible, on disk."""
    _OUTCOMES[key] = (rule, capacity_bytes or 0)
    path = _path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "key": key,
            "capacity_bytes": capacity_bytes or 0,
            "residence": rule.residence,
            "way": asdict(rule.savings),  # the key that version 0.1 wrote
            "images_per_call": rule.images_per_call,
        }
        atomic_write(path, json.dumps(content, indent=1))
    except OSError:
        return


def has_outcome() -> bool:
    """Return whether any outcome may be stored, which is cheaper to check than building a key."""
    return bool(_OUTCOMES) or _folder().is_dir()


def load_outcome(key: str, capacity_bytes: int | None) -> MemoryRule | None:
    """Return the memory settings stored for a key, or None.

    Stored settings are ignored if the device has more memory available now.
    """
    outcome = _OUTCOMES.get(key) or _read(key)
    if outcome is None or (capacity_bytes or 0) > outcome[1] * _MARGIN:
        return None
    return outcome[0]


def remove_outcomes() -> int:
    """Remove the stored settings of all keys; return the number of removed files."""
    _OUTCOMES.clear()
    return remove_files(path for path in _folder().glob("*.json") if _FILE_NAME.fullmatch(path.name))


def _folder() -> Path:
    return find_cache_folder() / "memory"


def _path(key: str) -> Path:
    # Keys are long and have characters that file names cannot have. The file contains the key itself.
    return _folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def _read(key: str) -> tuple[MemoryRule, int] | None:
    try:
        content: dict[str, Any] = json.loads(_path(key).read_text())
        rule = MemoryRule(content["residence"], MemorySavings(**content["way"]), content["images_per_call"])
        hash(rule)  # raises TypeError if a field has the wrong type, such as a list
        return (rule, int(content["capacity_bytes"])) if content["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):  # a damaged file
        return None
