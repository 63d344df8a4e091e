"""What was compiled, kept under `ANYACCEL_CACHE`: an entry for each model structure, shape, type, device and versions.

An entry is a folder with a payload and a small file that says what it is for and what its checksum is. It is written
aside and renamed, so that two processes that make the same one do not harm each other. One that is damaged is said so,
removed, and made anew; one of other versions or of another device has another name, and is never loaded.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from anyaccel.errors import UsageError
from anyaccel.storage.cache_dir import find_cache_folder, find_graphs_folder, tell_write_fault

__all__ = [
    "Entry",
    "Imported",
    "Pruned",
    "export_entries",
    "find_folder",
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
_ABOUT, _PAYLOAD = "entry.json", "payload.bin"
_MOST_BYTES = 4 * 2**30
_NAME = re.compile(r"[0-9a-f]{32}")
_MAKING = ".making-"
_LATEST = 253_370_764_800
"""Seconds since 1970 at the begin of the year 9999."""
_LONGEST_S = 10**9
_DAY_S = 86400


@dataclass(frozen=True)
class Entry:
    """One kept thing; one whose description cannot be read has no key, and is not sound."""

    name: str
    """The digest of its key, and the name of its folder."""
    key: dict[str, str]
    payload_bytes: int
    sha256: str
    made: float
    """Seconds since 1970."""
    took_s: float
    """What it took to make."""
    folder: Path

    def is_sound(self) -> bool:
        """Whether its payload is the one that was written."""
        try:
            return _digest_file(self.folder / _PAYLOAD) == self.sha256
        except OSError:
            return False


class Imported(NamedTuple):
    """What came of a file's entries."""

    taken: int
    here: int
    """How many were here before, and sound."""
    refused: list[str]
    """What was left out, and why."""


class Pruned(NamedTuple):
    """What was removed."""

    removed: int
    freed_bytes: int
    foreign: list[str]
    """What lies there that is no entry, and was left alone."""


def find_folder() -> Path:
    """Where entries are."""
    return find_cache_folder() / "compiled"


def name_key(key: dict[str, str]) -> str:
    """The name of the entry for a key."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]


def load_payload(key: dict[str, str]) -> bytes | None:
    """What is kept for a key; None where nothing is, or nothing sound."""
    folder = find_folder() / name_key(key)
    if not os.path.isdir(folder):
        return None
    entry = _read(folder)
    try:
        if entry is not None and entry.key == key and entry.is_sound():
            return (folder / _PAYLOAD).read_bytes()
    except OSError:  # another process removed it
        return None
    _LOG.warning("anyaccel: what was kept in %s is damaged, and is made anew", folder)
    _remove(folder)
    return None


def remove_payload(key: dict[str, str]) -> None:
    """Forget what is kept for a key."""
    _remove(find_folder() / name_key(key))


def save_payload(key: dict[str, str], payload: bytes, took_s: float) -> bool:
    """Keep a payload; whether it is kept. Where another process was first, its entry stays; a damaged one does not."""
    root = find_folder()
    folder = root / name_key(key)
    about = {"key": key, "sha256": hashlib.sha256(payload).hexdigest(), "made": time.time(), "took_s": round(took_s, 2)}
    try:
        root.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=_MAKING, dir=root))
        try:
            (aside / _PAYLOAD).write_bytes(payload)
            (aside / _ABOUT).write_text(json.dumps(about, indent=1))
            if os.path.isdir(folder) and not _is_sound(folder):
                _remove(folder)
            os.rename(aside, folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        if _is_sound(folder):
            return True
        tell_write_fault(f"{folder} cannot be written: {error.strerror or error}")
        return False
    return True


def list_entries() -> list[Entry]:
    """All entries, the newest first; those that cannot be read are among them, without a key."""
    folders = [path for path in _folders() if _NAME.fullmatch(path.name) and os.path.isdir(path)]
    found = [_read(folder) or _describe_damaged(folder) for folder in folders]
    return sorted(found, key=lambda entry: -entry.made)


def _folders() -> list[Path]:
    """All that lies where entries are."""
    root = find_folder()
    return sorted(root.iterdir()) if os.path.isdir(root) else []


def _is_ours(folder: Path) -> bool:
    """Whether something has the shape of an entry, or of one that is being made: its name, and no files but two."""
    if not (_NAME.fullmatch(folder.name) or folder.name.startswith(_MAKING)):
        return False
    try:
        if folder.is_symlink() or not folder.is_dir():
            return False
        return all(file.name in (_ABOUT, _PAYLOAD) and _is_plain(file) for file in folder.iterdir())
    except OSError:
        return False


def _is_plain(file: Path) -> bool:
    return file.is_symlink() or not file.is_dir()


def _remove(folder: Path) -> bool:
    """Remove an entry; whether it is gone. What has another shape was not written here, and stays."""
    if _is_ours(folder):
        shutil.rmtree(folder, ignore_errors=True)
    return not os.path.lexists(folder)


def _measure(folder: Path) -> int:
    """The bytes of all files in a folder; links are not followed."""
    total = 0
    for where, _, files in os.walk(folder):
        for file in files:
            try:
                total += os.lstat(os.path.join(where, file)).st_size
            except OSError:  # removed meanwhile
                continue
    return total


def _read_about(content: bytes) -> tuple[dict[str, str], str, float, float]:
    """An entry's key, its checksum, when it was made and what it took; a ValueError where that is none."""
    try:
        about: dict[str, Any] = json.loads(content)
        key, sha256, made, took_s = about["key"], about["sha256"], about["made"], about["took_s"]
        if not isinstance(sha256, str) or not all(isinstance(part, str) for pair in key.items() for part in pair):
            raise ValueError("its key or checksum is no text")
        "".join(part for pair in key.items() for part in pair).encode()  # half characters cannot be shown
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("it is no description of an entry") from error
    return key, sha256, _read_number(made, _LATEST), _read_number(took_s, _LONGEST_S)


def _read_number(value: Any, most: int) -> float:
    """A number from 0 to the largest that makes sense; what is not finite is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise ValueError(f"{value!r:.40} is no number from 0 to {most}")
    return float(value)


def _read(folder: Path) -> Entry | None:
    try:
        key, sha256, made, took_s = _read_about((folder / _ABOUT).read_bytes())
        size = (folder / _PAYLOAD).stat().st_size
    except (OSError, ValueError):
        return None
    return Entry(folder.name, key, size, sha256, made, took_s, folder) if name_key(key) == folder.name else None


def _is_sound(folder: Path) -> bool:
    entry = _read(folder)
    return entry is not None and entry.is_sound()


def _describe_damaged(folder: Path) -> Entry:
    """An entry whose description cannot be read: its size, and when it was written."""
    try:
        made = min(max(0.0, folder.stat().st_mtime), float(_LATEST))
    except OSError:
        made = 0.0
    return Entry(folder.name, {}, _measure(folder), "", made, 0.0, folder)


def export_entries(path: Path, entries: list[Entry]) -> int:
    """Write entries into one file for another machine of the same kind; how many."""
    sound = [entry for entry in entries if entry.is_sound()]
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with tarfile.open(draft, "w:gz") as archive:
            for entry in sound:
                for name in (_ABOUT, _PAYLOAD):
                    archive.add(entry.folder / name, f"{entry.name}/{name}", recursive=False)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return len(sound)


def import_entries(path: Path) -> Imported:
    """Take entries in from a file that `export_entries` wrote. One that is here and damaged is replaced."""
    taken, here, refused = 0, 0, []
    parts: dict[str, dict[str, bytes]] = {}
    try:
        with tarfile.open(path, "r:gz") as archive:
            for name, file, content in _members(archive):
                parts.setdefault(name, {})[file] = content
    except (tarfile.TarError, EOFError, OSError) as error:
        raise UsageError(
            f"{path} holds no entries: {error}", hint="give a file that `anyaccel cache export` wrote"
        ) from error
    for name, files in parts.items():
        words = _find_import_fault(name, files)
        if words:
            refused.append(f"{name}: {words}")
        elif _is_sound(find_folder() / name):
            here += 1
        else:
            key, _, _, took_s = _read_about(files[_ABOUT])
            kept = save_payload(key, files[_PAYLOAD], took_s)
            taken += kept
            refused += [] if kept else [f"{name}: it cannot be written"]
    return Imported(taken, here, refused)


def _members(archive: tarfile.TarFile) -> Iterator[tuple[str, str, bytes]]:
    """The plain files of an archive that are where an entry has them; nothing is ever written by its own path."""
    total = 0
    for member in archive:
        where = PurePosixPath(member.name)
        is_part = len(where.parts) == 2 and _NAME.fullmatch(where.parts[0]) and where.name in (_ABOUT, _PAYLOAD)
        if not member.isfile() or not is_part:
            raise tarfile.TarError(f"{member.name!r} is no part of an entry")
        total += member.size
        if total > _MOST_BYTES:
            raise tarfile.TarError("it is larger than any cache")
        content = archive.extractfile(member)
        yield where.parts[0], where.name, b"" if content is None else content.read()


def _find_import_fault(name: str, files: dict[str, bytes]) -> str:
    """Why an entry of a file is not taken in; empty where it can be."""
    if set(files) != {_ABOUT, _PAYLOAD}:
        return "a part is missing"
    try:
        key, sha256, _, _ = _read_about(files[_ABOUT])
    except ValueError:
        return "what it is for cannot be read"
    if name_key(key) != name:
        return "its name is not that of its key"
    return "" if hashlib.sha256(files[_PAYLOAD]).hexdigest() == sha256 else "its checksum is wrong"


def prune_entries(*, older_than_days: float | None = None, versions: dict[str, str] | None = None) -> Pruned:
    """Remove what is damaged, what is of other versions, and what is old; with neither versions nor an age, all.

    What has not the shape of an entry was written by somebody else, and is left alone.
    """
    count, freed, foreign = 0, 0, []
    everything = older_than_days is None and versions is None
    for folder in _folders():
        if not _is_ours(folder):
            foreign.append(str(folder))
        elif everything or _is_past(folder, older_than_days, versions or {}):
            size = _measure(folder)
            if _remove(folder):
                count, freed = count + 1, freed + size
    return Pruned(count, freed, foreign)


def _is_past(folder: Path, older_than_days: float | None, versions: dict[str, str]) -> bool:
    """Whether an entry is damaged, of other versions or too old; one that is being made, if nobody can be at it."""
    if folder.name.startswith(_MAKING):
        return _describe_damaged(folder).made < time.time() - _DAY_S
    entry = _read(folder)
    if entry is None or any(entry.key.get(name) != version for name, version in versions.items()):
        return True
    old = older_than_days is not None and entry.made < time.time() - older_than_days * _DAY_S
    return old or not entry.is_sound()


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


def _digest_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()
