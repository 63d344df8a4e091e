"""The compile cache under `ANYACCEL_CACHE`: one entry per model structure, shape, dtype, device and versions.

An entry is one file, named by the digest of its key: a line that names the format, a line of JSON (key, checksum,
creation time, compile time) and the payload. A damaged entry is logged, removed and compiled again. An entry of other
versions or of another device has another key, so that it is never loaded.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyaccel.errors import UsageError
from anyaccel.storage.atomic_write import atomic_writer, is_temporary_file
from anyaccel.storage.cache_dir import find_cache_folder, find_graphs_folder, tell_write_fault

__all__ = [
    "Entry",
    "export_entries",
    "find_folder",
    "find_path",
    "import_entries",
    "list_entries",
    "load_payload",
    "measure_graphs",
    "prune_entries",
    "remove_graphs",
    "remove_payload",
    "save_payload",
]

_LOG = logging.getLogger("anyaccel")
_MAGIC = b"anyaccel compile cache 1\n"
_MEMBER = re.compile(r"[0-9a-f]{32}\.compiled")
_MAX_IMPORT_BYTES = 4 * 2**30
_MAX_CREATED = 253_370_764_800
"""Seconds since 1970 at the start of the year 9999."""
_MAX_TOOK_S = 10**9
_DAY_S = 86400
_OLD_NAME = re.compile(r"[0-9a-f]{32}|\.making-.*")
_OLD_FILES = ("entry.json", "payload.bin")
"""The files of an entry of version 0.1, which was a directory. They are not loaded, only pruned."""


@dataclass(frozen=True)
class Entry:
    """A file of the cache, without its payload."""

    path: Path
    key: dict[str, str]
    """Empty if the header cannot be read."""
    payload_bytes: int
    """The size of the whole file if the header cannot be read."""
    created: float
    """Seconds since 1970."""
    took_s: float
    """The time that compilation took."""
    fault: str = ""
    """Why the entry cannot be used; empty if it can."""

    @property
    def name(self) -> str:
        """The digest of the key."""
        return self.path.stem


def find_folder() -> Path:
    """Return the directory of the entries."""
    return find_cache_folder() / "compiled"


def find_path(key: dict[str, str]) -> Path:
    """Return the path of the entry for a key."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    return find_folder() / f"{digest}.compiled"


def load_payload(key: dict[str, str]) -> bytes | None:
    """Return the payload for a key; None if there is no entry, or it is damaged, in which case it is removed."""
    path = find_path(key)
    try:
        content = path.read_bytes()
    except OSError:  # there is none, or it cannot be read
        return None
    entry, payload = _parse(path, content)
    if not entry.fault:
        return payload
    _LOG.warning("anyaccel: the cache entry %s is damaged (%s), and is compiled again", path, entry.fault)
    remove_payload(key)
    return None


def remove_payload(key: dict[str, str]) -> None:
    """Remove the entry for a key."""
    find_path(key).unlink(missing_ok=True)


def save_payload(key: dict[str, str], payload: bytes, took_s: float) -> bool:
    """Write an entry; return whether that succeeded. An entry that exists is replaced."""
    path = find_path(key)
    checksum = hashlib.sha256(payload).hexdigest()
    header = {"key": key, "sha256": checksum, "created": time.time(), "took_s": round(took_s, 2)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_writer(path) as file:
            file.write(_MAGIC + json.dumps(header).encode() + b"\n")
            file.write(payload)
    except OSError as error:
        tell_write_fault(f"{path} cannot be written: {error.strerror or error}")
        return False
    return True


def list_entries() -> list[Entry]:
    """Return all entries, the newest first, those with a fault included."""
    entries = [entry for path in _list_paths() if (entry := _read(path)) is not None]
    return sorted(entries, key=lambda entry: -entry.created)


def _list_paths() -> list[Path]:
    root = find_folder()
    return sorted(root.iterdir()) if root.is_dir() else []


def _read(path: Path) -> Entry | None:
    """Read an entry; None for anything that does not begin as an entry does."""
    try:
        if path.is_symlink() or not path.is_file():
            return None
        with path.open("rb") as file:
            begin = file.read(len(_MAGIC))
            return _parse(path, begin + file.read())[0] if begin == _MAGIC else None
    except OSError:  # another process removed it
        return None


def _parse(path: Path, content: bytes) -> tuple[Entry, bytes]:
    """Split the content of a file into an entry, which has a fault if it is damaged, and its payload."""
    header, _, payload = content.removeprefix(_MAGIC).partition(b"\n")
    try:
        if not content.startswith(_MAGIC):
            raise ValueError("the format is not known")
        key, sha256, created, took_s = _parse_header(header)
    except ValueError:
        return Entry(path, {}, len(content), 0.0, 0.0, "its header cannot be read"), b""
    if find_path(key).name != path.name:
        return Entry(path, {}, len(content), created, took_s, "its name is not that of its key"), b""
    fault = "" if hashlib.sha256(payload).hexdigest() == sha256 else "its checksum is wrong"
    return Entry(path, key, len(payload), created, took_s, fault), payload


def _parse_header(content: bytes) -> tuple[dict[str, str], str, float, float]:
    """Return key, checksum, creation time and compile time; raise ValueError if one of them is not valid."""
    try:
        header: dict[str, Any] = json.loads(content)
        key, sha256, created, took_s = header["key"], header["sha256"], header["created"], header["took_s"]
        if not isinstance(sha256, str) or not all(isinstance(part, str) for pair in key.items() for part in pair):
            raise ValueError("the key and the checksum must be strings")
        json.dumps(key, ensure_ascii=False).encode()  # lone surrogates cannot be printed
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("not the header of an entry") from error
    return key, sha256, _parse_number(created, _MAX_CREATED), _parse_number(took_s, _MAX_TOOK_S)


def _parse_number(value: Any, maximum: int) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= maximum:
        raise ValueError(f"{value!r:.40} is not a number from 0 to {maximum}")
    return float(value)


def export_entries(path: Path, entries: list[Entry]) -> int:
    """Write entries into one file for another machine of the same kind; return how many."""
    sound = [entry for entry in entries if not entry.fault]
    with atomic_writer(path) as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        for entry in sound:
            archive.add(entry.path, entry.path.name, recursive=False)
    return len(sound)


def import_entries(path: Path) -> tuple[int, int, list[str]]:
    """Import the entries of a file that `export_entries` wrote, also over damaged ones.

    Return how many were imported, how many existed before, and which were refused and why.
    """
    try:
        with tarfile.open(path, "r:gz") as archive:
            contents = dict(_read_members(archive))
    except (tarfile.TarError, EOFError, OSError) as error:
        raise UsageError(
            f"{path} holds no entries: {error}", hint="give a file that `anyaccel cache export` of this version wrote"
        ) from error
    imported, existing, refused = 0, 0, []
    for name, content in contents.items():
        entry, payload = _parse(find_folder() / name, content)
        before = _read(entry.path)
        if entry.fault:
            refused.append(f"{entry.name}: {entry.fault}")
        elif before is not None and not before.fault:
            existing += 1
        elif save_payload(entry.key, payload, entry.took_s):
            imported += 1
        else:
            refused.append(f"{entry.name}: it cannot be written")
    return imported, existing, refused


def _read_members(archive: tarfile.TarFile) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of an archive's entries; nothing is ever written to a path of the archive."""
    total = 0
    for member in archive:
        if not member.isfile() or not _MEMBER.fullmatch(member.name):
            raise tarfile.TarError(f"{member.name!r} is not an entry")
        total += member.size
        if total > _MAX_IMPORT_BYTES:
            raise tarfile.TarError(f"it is larger than {_MAX_IMPORT_BYTES} bytes")
        content = archive.extractfile(member)
        yield member.name, b"" if content is None else content.read()


def prune_entries(
    *, older_than_days: float | None = None, versions: dict[str, str] | None = None
) -> tuple[int, int, list[str]]:
    """Remove entries that are damaged, of other versions or old; with neither versions nor an age, all.

    Return how many were removed, their bytes, and the paths that are not entries, which stay.
    """
    removed, freed_bytes, foreign = 0, 0, []
    everything = older_than_days is None and versions is None
    for path in _list_paths():
        try:
            past = _is_past(path, older_than_days, versions or {})
        except OSError:  # it cannot be read, or another process removed it
            past = None
        if past is None:
            foreign.append(str(path))
        elif everything or past:
            size = _measure(path)
            if _remove(path):
                removed, freed_bytes = removed + 1, freed_bytes + size
    return removed, freed_bytes, foreign


def _is_past(path: Path, older_than_days: float | None, versions: dict[str, str]) -> bool | None:
    """Return whether a path is to be pruned; None if it is not part of the cache."""
    if is_temporary_file(path):
        return path.lstat().st_mtime < time.time() - _DAY_S  # a younger one may still be written
    if _is_old_entry(path):
        return True
    entry = _read(path)
    if entry is None:
        return None
    is_old = older_than_days is not None and entry.created < time.time() - older_than_days * _DAY_S
    return bool(entry.fault) or is_old or any(entry.key.get(name) != version for name, version in versions.items())


def _is_old_entry(path: Path) -> bool:
    """Return whether a path is an entry of version 0.1: a directory with nothing but its two files."""
    if not _OLD_NAME.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
        return False
    return all(file.name in _OLD_FILES for file in path.iterdir())


def _remove(path: Path) -> bool:
    """Remove an entry; return whether that succeeded."""
    try:
        if path.is_dir():
            for name in _OLD_FILES:
                (path / name).unlink(missing_ok=True)
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def _measure(path: Path) -> int:
    """Return the bytes of a file, or of all files in a directory; links are not followed."""
    files = [path] if not path.is_dir() else [Path(where, name) for where, _, names in os.walk(path) for name in names]
    total = 0
    for file in files:
        try:
            total += file.lstat().st_size
        except OSError:  # removed meanwhile
            continue
    return total


def measure_graphs() -> int:
    """The bytes of what compilers keep beside the entries, in folders of their own."""
    return sum(_measure(folder) for folder in _graph_folders())


def remove_graphs() -> tuple[int, list[str]]:
    """Remove what compilers keep beside the entries: its bytes, and what lies there that is of no backend."""
    root, freed = find_graphs_folder(), 0
    for folder in _graph_folders():
        size = _measure(folder)
        shutil.rmtree(folder, ignore_errors=True)
        freed += size - _measure(folder)
    try:
        foreign = [str(path) for path in sorted(root.iterdir())]
        if not foreign and not root.is_symlink():
            root.rmdir()
    except OSError:
        return freed, []
    return freed, foreign


def _graph_folders() -> list[Path]:
    """The folders of backends that are known here: a folder of any other name is none of ours."""
    from anyaccel.backends.registry import load_registry

    root = find_graphs_folder()
    paths = sorted(root.iterdir()) if os.path.isdir(root) else []
    known = set(load_registry().names())
    return [path for path in paths if path.name in known and path.is_dir() and not path.is_symlink()]
