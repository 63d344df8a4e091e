"""The compile cache in `ANYACCEL_CACHE`, keyed by model structure, shape, dtype, device and versions.

An entry is one file, named by the digest of its key. The file contains a line with the format name,
a line of JSON (key, checksum, creation time, compile time) and the payload. A corrupted entry is
removed, and the model is compiled again. Keys include the library versions and the device, so an
entry for another version or device is never loaded.
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
from anyaccel.storage.cache_dir import find_cache_folder, find_graphs_folder, warn_not_cached

__all__ = [
    "CacheEntry",
    "export_entries",
    "find_entries_dir",
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
# The start of the year 9999 in seconds since 1970. Headers come from imported files too, and a later time could not be
# formatted as a date.
_MAX_CREATED = 253_370_764_800
_MAX_TOOK_S = 10**9
_DAY_S = 86400
_OLD_NAME = re.compile(r"[0-9a-f]{32}|\.making-.*")
# The files in an entry of version 0.1, which was a directory. Such entries are pruned, never loaded.
_OLD_FILES = ("entry.json", "payload.bin")


@dataclass(frozen=True)
class CacheEntry:
    """The metadata of one file in the compile cache: its key, size, creation time and compile time."""

    path: Path
    key: dict[str, str]
    """Empty if the header cannot be read."""
    payload_bytes: int
    """The size of the whole file if the header cannot be read."""
    created: float
    """Seconds since 1970."""
    took_s: float
    """Compile time in seconds."""
    fault: str = ""
    """Why the entry cannot be used; empty if it can."""

    @property
    def name(self) -> str:
        """The file name without its suffix, which is the digest of the key."""
        return self.path.stem


def find_entries_dir() -> Path:
    """Return the directory that contains the compile-cache entries."""
    return find_cache_folder() / "compiled"


def find_path(key: dict[str, str]) -> Path:
    """Return the path of the compile-cache entry for a key, whether or not the entry exists."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    return find_entries_dir() / f"{digest}.compiled"


def load_payload(key: dict[str, str]) -> bytes | None:
    """Return the compiled code stored for a key, or None; remove the entry if it is corrupted."""
    path = find_path(key)
    try:
        content = path.read_bytes()
    except OSError:  # missing or unreadable
        return None
    entry, payload = _parse(path, content)
    if not entry.fault:
        return payload
    _LOG.warning("anyaccel: compiling again, because the cache entry %s is corrupted: %s", path, entry.fault)
    remove_payload(key)
    return None


def remove_payload(key: dict[str, str]) -> None:
    """Remove the compile-cache entry for a key, if it exists."""
    find_path(key).unlink(missing_ok=True)


def save_payload(key: dict[str, str], payload: bytes, took_s: float) -> bool:
    """Write or replace the compile-cache entry for a key; return False if it cannot be written."""
    path = find_path(key)
    checksum = hashlib.sha256(payload).hexdigest()
    header = {"key": key, "sha256": checksum, "created": time.time(), "took_s": round(took_s, 2)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_writer(path) as file:
            file.write(_MAGIC + json.dumps(header).encode() + b"\n")
            file.write(payload)
    except OSError as error:
        warn_not_cached(f"cannot write {path}: {error.strerror or error}")
        return False
    return True


def list_entries() -> list[CacheEntry]:
    """Return all compile-cache entries, newest first, including corrupted ones."""
    entries = [entry for path in _list_paths() if (entry := _read(path)) is not None]
    return sorted(entries, key=lambda entry: -entry.created)


def _list_paths() -> list[Path]:
    root = find_entries_dir()
    return sorted(root.iterdir()) if root.is_dir() else []


def _read(path: Path) -> CacheEntry | None:
    """Return the metadata of a compile-cache file; return None if it is not a cache entry."""
    try:
        if path.is_symlink() or not path.is_file():
            return None
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
            return _parse(path, magic + file.read())[0] if magic == _MAGIC else None
    except OSError:  # another process removed it
        return None


def _parse(path: Path, content: bytes) -> tuple[CacheEntry, bytes]:
    """Parse the content of a cache file into metadata and payload; set `fault` if it is corrupted."""
    header, _, payload = content.removeprefix(_MAGIC).partition(b"\n")
    try:
        if not content.startswith(_MAGIC):
            raise ValueError(f"the file does not start with {_MAGIC!r}")
        key, sha256, created, took_s = _parse_header(header)
    except ValueError:
        return CacheEntry(path, {}, len(content), 0.0, 0.0, "invalid header"), b""
    if find_path(key).name != path.name:
        return CacheEntry(path, {}, len(content), created, took_s, "the file name does not match the key"), b""
    fault = "" if hashlib.sha256(payload).hexdigest() == sha256 else "wrong checksum"
    return CacheEntry(path, key, len(payload), created, took_s, fault), payload


def _parse_header(content: bytes) -> tuple[dict[str, str], str, float, float]:
    """Return the key, checksum, creation time and compile time; raise ValueError for an invalid header."""
    try:
        header: dict[str, Any] = json.loads(content)
        key, sha256, created, took_s = header["key"], header["sha256"], header["created"], header["took_s"]
        if not isinstance(sha256, str) or not all(isinstance(item, str) for pair in key.items() for item in pair):
            raise ValueError("`key` must map strings to strings, and `sha256` must be a string")
        json.dumps(key, ensure_ascii=False).encode()  # lone surrogates cannot be printed
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("expected a JSON object with `key`, `sha256`, `created` and `took_s`") from error
    return key, sha256, _parse_number(created, _MAX_CREATED), _parse_number(took_s, _MAX_TOOK_S)


def _parse_number(value: Any, maximum: int) -> float:
    # bool is a subclass of int. NaN fails the comparison.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= maximum:
        raise ValueError(f"{value!r:.40} is not a number between 0 and {maximum}")
    return float(value)


def export_entries(path: Path, entries: list[CacheEntry]) -> int:
    """Write intact cache entries to an archive for use on another machine; return how many were written."""
    intact = [entry for entry in entries if not entry.fault]
    with atomic_writer(path) as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        for entry in intact:
            archive.add(entry.path, entry.path.name, recursive=False)
    return len(intact)


def import_entries(path: Path) -> tuple[int, int, list[str]]:
    """Import the compile-cache entries from an archive written by `export_entries`.

    Existing entries are replaced only if they are corrupted. Return the number of imported entries, the
    number that already existed, and a list of rejected entries with reasons. Raise `UsageError` if the
    archive is invalid.
    """
    try:
        with tarfile.open(path, "r:gz") as archive:
            contents = dict(_read_members(archive))
    except (tarfile.TarError, EOFError, OSError) as error:
        raise UsageError(
            f"{path} is not a valid cache archive: {error}",
            hint="create it again with `anyaccel cache export` from the same version of anyaccel",
        ) from error
    imported, existing, rejected = 0, 0, []
    for name, content in contents.items():
        entry, payload = _parse(find_entries_dir() / name, content)
        before = _read(entry.path)
        if entry.fault:
            rejected.append(f"{entry.name}: {entry.fault}")
        elif before is not None and not before.fault:
            existing += 1
        elif save_payload(entry.key, payload, entry.took_s):
            imported += 1
        else:
            rejected.append(f"{entry.name}: cannot be written")
    return imported, existing, rejected


def _read_members(archive: tarfile.TarFile) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of each cache entry in an archive; raise `TarError` for other members."""
    # Nothing is extracted to disk: a malicious archive could contain absolute paths, links or huge files.
    total = 0
    for member in archive:
        if not member.isfile() or not _MEMBER.fullmatch(member.name):
            raise tarfile.TarError(f"{member.name!r} is not a cache entry")
        total += member.size
        if total > _MAX_IMPORT_BYTES:
            raise tarfile.TarError(f"the total size of the entries exceeds {_MAX_IMPORT_BYTES:,} bytes")
        content = archive.extractfile(member)
        yield member.name, b"" if content is None else content.read()


def prune_entries(
    *, older_than_days: float | None = None, versions: dict[str, str] | None = None
) -> tuple[int, int, list[str]]:
    """Remove corrupted and outdated compile-cache entries; without arguments, remove all entries.

    An entry is outdated if it is older than `older_than_days` or its library versions differ from
    `versions`. Return the number of removed entries, their size in bytes, and the paths that were kept
    because they are not cache entries.
    """
    removed, freed_bytes, foreign = 0, 0, []
    remove_all = older_than_days is None and versions is None
    for path in _list_paths():
        try:
            stale = _is_stale(path, older_than_days, versions or {})
        except OSError:  # unreadable, or removed by another process
            stale = None
        if stale is None:
            foreign.append(str(path))
        elif remove_all or stale:
            size = _measure(path)
            if _remove(path):
                removed, freed_bytes = removed + 1, freed_bytes + size
    return removed, freed_bytes, foreign


def _is_stale(path: Path, older_than_days: float | None, versions: dict[str, str]) -> bool | None:
    """Return whether a cache file is corrupted or outdated; return None if the path is not a cache file."""
    if is_temporary_file(path):
        return path.lstat().st_mtime < time.time() - _DAY_S  # another process may still be writing a newer one
    if _is_old_entry(path):
        return True
    entry = _read(path)
    if entry is None:
        return None
    is_old = older_than_days is not None and entry.created < time.time() - older_than_days * _DAY_S
    return bool(entry.fault) or is_old or any(entry.key.get(name) != version for name, version in versions.items())


def _is_old_entry(path: Path) -> bool:
    """Return whether a path is a cache entry of version 0.1, which was a directory with two files."""
    if not _OLD_NAME.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
        return False
    return all(file.name in _OLD_FILES for file in path.iterdir())


def _remove(path: Path) -> bool:
    """Remove a compile-cache entry; return False if it cannot be removed."""
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
    """Return the size of a file or directory in bytes, without following symbolic links."""
    files = [path] if not path.is_dir() else [Path(root, name) for root, _, names in os.walk(path) for name in names]
    total = 0
    for file in files:
        try:
            total += file.lstat().st_size
        except OSError:  # removed by another process
            continue
    return total


def measure_graphs() -> int:
    """Return the total size in bytes of the cache directories that the compilers use."""
    return sum(_measure(folder) for folder in _graph_folders())


def remove_graphs() -> tuple[int, list[str]]:
    """Remove the compilers' cache directories; return the freed bytes and the paths that were kept.

    Paths that do not belong to a registered backend are kept.
    """
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
    """Return the compilers' cache directories, which are named after registered backends."""
    from anyaccel.backends.registry import load_registry

    root = find_graphs_folder()
    paths = sorted(root.iterdir()) if os.path.isdir(root) else []
    backends = set(load_registry().names())
    return [path for path in paths if path.name in backends and path.is_dir() and not path.is_symlink()]
