"""What was learnt the hard way: which rule a call of one shape needed on one device, kept between runs."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from anyaccel.planning.footprint import MemorySavings
from anyaccel.planning.memory import MemoryRule
from anyaccel.storage.atomic_write import atomic_write
from anyaccel.storage.cache_dir import find_cache_folder

__all__ = ["has_outcome", "load_outcome", "save_outcome"]

_MARGIN = 1.02
"""With this much more memory than there was, what failed then is tried again."""
_LEARNT: dict[str, tuple[MemoryRule, int]] = {}


def save_outcome(key: str, rule: MemoryRule, capacity_bytes: int | None) -> None:
    """Keep the rule that a call needed, in this process and, where it can be written, in a small file."""
    _LEARNT[key] = (rule, capacity_bytes or 0)
    path = _path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"key": key, "capacity_bytes": capacity_bytes or 0, **asdict(rule)}
        atomic_write(path, json.dumps(content, indent=1))
    except OSError:
        return


def has_outcome() -> bool:
    """Whether anything was ever kept here."""
    return bool(_LEARNT) or _folder().is_dir()


def load_outcome(key: str, capacity_bytes: int | None) -> MemoryRule | None:
    """The rule that a call needed before, unless there is more memory now."""
    found = _LEARNT.get(key) or _read(key)
    if found is None or (capacity_bytes or 0) > found[1] * _MARGIN:
        return None
    return found[0]


def _folder() -> Path:
    return find_cache_folder() / "memory"


def _path(key: str) -> Path:
    return _folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def _read(key: str) -> tuple[MemoryRule, int] | None:
    try:
        kept: dict[str, Any] = json.loads(_path(key).read_text())
        rule = MemoryRule(kept["residence"], MemorySavings(**kept["way"]), kept["images_per_call"])
        hash(rule)
        return (rule, int(kept["capacity_bytes"])) if kept["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
