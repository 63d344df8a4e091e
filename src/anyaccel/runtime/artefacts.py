"""What was compiled, kept under `ANYACCEL_CACHE`: an entry for each model structure, shape, type, device and versions.

An entry is a folder with a payload and a small file that says what it is for and what its checksum is. It is written
aside and renamed, so that two processes that make the same one do not harm each other. One that is damaged is said so,
removed, and made anew; one of other versions or of another device has another name, and is never loaded.
"""

from __future__ import annotations

import hashlib
import io
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
from typing import Any

from anyaccel.backends.cache_folder import find_cache_folder
from anyaccel.errors import UsageError

__all__ = [
    "Entry",
    "export_entries",
    "find_folder",
    "import_entries",
    "list_entries",
    "load_payload",
    "prune_entries",
    "save_payload",
]

_LOG = logging.getLogger("anyaccel")
_ABOUT, _PAYLOAD = "entry.json", "payload.bin"
_MOST_BYTES = 4 * 2**30
_NAME = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Entry:
    """One kept thing."""

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


def find_folder() -> Path:
    """Where entries are."""
    return find_cache_folder() / "compiled"


def name_key(key: dict[str, str]) -> str:
    """The name of the entry for a key."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]


def load_payload(key: dict[str, str]) -> bytes | None:
    """What is kept for a key; None where nothing is, or nothing sound."""
    folder = find_folder() / name_key(key)
    if not folder.is_dir():
        return None
    entry = _read(folder)
    if entry is None or entry.key != key or not entry.is_sound():
        _LOG.warning("anyaccel: what was kept in %s is damaged, and is made anew", folder)
        shutil.rmtree(folder, ignore_errors=True)
        return None
    return (folder / _PAYLOAD).read_bytes()


def save_payload(key: dict[str, str], payload: bytes, took_s: float) -> bool:
    """Keep a payload; whether it could be written. Where another process was first, its entry stays."""
    root = find_folder()
    about = {"key": key, "sha256": hashlib.sha256(payload).hexdigest(), "made": time.time(), "took_s": round(took_s, 2)}
    try:
        root.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=".making-", dir=root))
        try:
            (aside / _PAYLOAD).write_bytes(payload)
            (aside / _ABOUT).write_text(json.dumps(about, indent=1))
            os.rename(aside, root / name_key(key))
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except OSError:
        return (root / name_key(key)).is_dir()
    return True


def list_entries() -> list[Entry]:
    """All entries that can be read, the newest first."""
    root = find_folder()
    folders = [path for path in root.iterdir() if path.is_dir() and path.name[0] != "."] if root.is_dir() else []
    found = [entry for folder in folders if (entry := _read(folder)) is not None]
    return sorted(found, key=lambda entry: -entry.made)


def _read(folder: Path) -> Entry | None:
    try:
        about: dict[str, Any] = json.loads((folder / _ABOUT).read_text())
        key = {str(name): str(value) for name, value in about["key"].items()}
        size = (folder / _PAYLOAD).stat().st_size
        entry = Entry(
            folder.name, key, size, str(about["sha256"]), float(about["made"]), float(about["took_s"]), folder
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return None
    return entry if name_key(key) == folder.name else None


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


def import_entries(path: Path) -> tuple[int, list[str]]:
    """Take entries in from a file that `export_entries` wrote: how many are new, and what was left out and why."""
    taken, refused = 0, []
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
        words = _take_in(name, files)
        taken += not words
        refused += [f"{name}: {words}"] if words else []
    return taken, refused


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


def _take_in(name: str, files: dict[str, bytes]) -> str:
    """Keep one imported entry; why not, where it is not."""
    if set(files) != {_ABOUT, _PAYLOAD}:
        return "a part is missing"
    try:
        about = json.load(io.BytesIO(files[_ABOUT]))
        key = {str(one): str(other) for one, other in about["key"].items()}
        took = float(about["took_s"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "what it is for cannot be read"
    if name_key(key) != name:
        return "its name is not that of its key"
    if hashlib.sha256(files[_PAYLOAD]).hexdigest() != about.get("sha256"):
        return "its checksum is wrong"
    if (find_folder() / name).is_dir():
        return "it is here already"
    return "" if save_payload(key, files[_PAYLOAD], took) else "it cannot be written"


def prune_entries(*, older_than_days: float | None = None, versions: dict[str, str] | None = None) -> tuple[int, int]:
    """Remove what is damaged, what is of other versions, and what is old: how many entries, and their bytes.

    With neither versions nor an age, all.
    """
    root, count, freed = find_folder(), 0, 0
    for folder in list(root.iterdir()) if root.is_dir() else []:
        entry = _read(folder)
        stale = entry is not None and versions is not None and any(entry.key.get(n) != v for n, v in versions.items())
        old = entry is not None and older_than_days is not None and entry.made < time.time() - older_than_days * 86400
        everything = older_than_days is None and versions is None
        if entry is None or stale or old or everything or not entry.is_sound():
            if folder.name.startswith(".making-") and not everything:
                continue  # another process may be at it
            freed += sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            if folder.is_file():  # something that nobody here wrote
                folder.unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
            count += 1
    return count, freed


def _digest_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()
