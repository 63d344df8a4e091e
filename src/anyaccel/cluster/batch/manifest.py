"""The folder of a batch: what run it is of, its pictures, and a manifest with a line for each row that is over.

A picture is written whole under the name that its row gives it, and then its line: whatever ends the process between
the two, the next start finds the picture by the record that it carries, and writes the line that is missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from anyaccel.cluster.batch.rows import BatchRow
from anyaccel.errors import AnyaccelError, UsageError
from anyaccel.generation.image_format import read_metadata
from anyaccel.generation.output_files import make_stem, write_whole
from anyaccel.storage.atomic_write import remove_temporary_files
from anyaccel.storage.file_lock import lock_file

__all__ = ["OutputFolder"]

_RUN, _MANIFEST, _LOCK, _PICTURES = "run.json", "manifest.jsonl", ".lock", "pictures"
_FORMAT = 1
_MAKE_ROOM = "make room and start again: what is made is kept"


class OutputFolder:
    """The folder, held by this process alone until it is closed."""

    def __init__(self, path: Path, run: Mapping[str, Any]) -> None:
        """Take a folder that is new, empty, or of the same run; `run` says what it depends on."""
        self.path = path
        self._make()
        self._lock = lock_file(
            path / _LOCK, f"another process writes to {path}", "let it end, or take another folder with --out"
        )
        self.run: dict[str, Any] = {"format": _FORMAT, **run}
        try:
            remove_temporary_files(path, older_than_s=0)
            remove_temporary_files(path / _PICTURES, older_than_s=0)
            self._join_run()
            self.entries = self._read_manifest()
            self._file: IO[bytes] = (path / _MANIFEST).open("ab")
        except BaseException:
            self._lock.close()
            raise

    def close(self) -> None:
        """Let go of it."""
        with contextlib.suppress(OSError):  # a line that could not be written was told; the others are on the disk
            self._file.close()
        self._lock.close()

    def tidy(self) -> None:
        """Leave the last line of each row alone, where one was tried or made again."""
        path = self.path / _MANIFEST
        if path.read_bytes().count(b"\n") > len(self.entries):
            self._file.close()
            self._write(path, b"".join(map(_as_line, self.entries.values())))
            self._file = path.open("ab")

    def __enter__(self) -> OutputFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def picture_path(self, row: BatchRow) -> Path:
        """Where a row's picture goes."""
        return self.path / _PICTURES / f"{row.number:06}-{make_stem(row.prompt)}-{row.seed}.png"

    def settle(self, name: str, value: Any) -> Any:
        """Remember something that was decided once for the whole run; gives what was decided first."""
        if name not in self.run:
            self.run[name] = value
            self._write(self.path / _RUN, _as_line(self.run, indent=1))
        return self.run[name]

    def find_open(self, rows: Iterable[BatchRow]) -> list[BatchRow]:
        """The rows that are yet to be made: those without a picture, and those that failed the last time."""
        found = []
        for row in rows:
            entry = self.entries.get(row.number)
            if entry is not None and "error" not in entry and self._holds(row, entry):
                continue
            if not self._adopt(row):
                found.append(row)
        return found

    def add_picture(self, row: BatchRow, content: bytes, facts: Mapping[str, Any]) -> None:
        """Write a picture, and its line."""
        path = self.picture_path(row)
        self._write(path, content)
        self._add(row, {**self._describe(path, content), **facts})

    def add_failure(self, row: BatchRow, error: str, facts: Mapping[str, Any]) -> None:
        """Write the line of a row that failed."""
        self._add(row, {"error": error, **facts})

    def _make(self) -> None:
        """Make the folder, unless what is there is something else."""
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"{self.path} is a file, and not a folder", hint="give another name to --out")
        if self.path.is_dir() and not (self.path / _RUN).exists():
            there = [one.name for one in self.path.iterdir() if not one.name.startswith(".") and not _is_bare(one)]
            if there:
                raise UsageError(
                    f"{self.path} holds other things ({', '.join(sorted(there)[:3])}), and no batch",
                    hint="take a new or an empty folder with --out",
                )
        try:
            (self.path / _PICTURES).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"no folder can be made at {self.path}: {error.strerror}", hint="choose another with --out"
            ) from error

    def _join_run(self) -> None:
        path = self.path / _RUN
        if not path.exists() or self._is_unused():
            self._write(path, _as_line(self.run, indent=1))
            return
        try:
            found = json.loads(path.read_bytes())
            assert isinstance(found, dict)
        except (ValueError, AssertionError) as error:
            raise UsageError(f"{path} is damaged", hint="take another folder with --out") from error
        for name, value in self.run.items():
            if found.get(name) != value:
                both = "the rows are others" if name == "input" else f"{name} was {found.get(name)}, and is {value}"
                raise UsageError(
                    f"{self.path} is of another run: {both}",
                    hint="take another folder with --out, or start it as it was started",
                )
        self.run = found

    def _is_unused(self) -> bool:
        """Whether nothing was made yet: then another run may have the folder, such as the same without its mistake."""
        manifest = self.path / _MANIFEST
        lines = manifest.stat().st_size if manifest.exists() else 0
        return not lines and not any((self.path / _PICTURES).iterdir())

    def _read_manifest(self) -> dict[int, dict[str, Any]]:
        """The last line of each row; half a line at the end, which a crash left, is cut off."""
        path = self.path / _MANIFEST
        if not path.exists():
            return {}
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(path, len(whole))
        entries: dict[int, dict[str, Any]] = {}
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                entry = json.loads(line)
                entries[entry["row"]] = entry
            except (ValueError, KeyError, TypeError) as error:
                raise UsageError(
                    f"line {number} of {path} is damaged", hint="remove it, or take another folder with --out"
                ) from error
        return entries

    def _holds(self, row: BatchRow, entry: Mapping[str, Any]) -> bool:
        """Whether the picture of a line is there as it was written."""
        try:
            content = (self.path / entry["path"]).read_bytes()
        except (OSError, KeyError, TypeError, ValueError):
            return False
        return hashlib.sha256(content).hexdigest() == entry.get("sha256") and entry.get("seed") == row.seed

    def _adopt(self, row: BatchRow) -> bool:
        """Write the line of a picture that is there without one, if it says itself that it is this row's."""
        path = self.picture_path(row)
        if not path.exists():
            return False
        try:
            (origin,) = read_metadata(path)
            asked = origin.arguments()
        except (UsageError, ValueError):
            return False
        given = {"prompt": row.prompt, "seed": row.seed, **row.call}
        if any(asked.get(name) != value for name, value in given.items()) or origin.model != self.run["model"]:
            return False
        if any(getattr(origin, name) != self.run.get(name) for name in ("revision", "dtype") if name in self.run):
            return False
        self._add(row, {**self._describe(path, path.read_bytes()), "device": origin.device, "dtype": origin.dtype})
        return True

    def _describe(self, path: Path, content: bytes) -> dict[str, Any]:
        return {"path": path.relative_to(self.path).as_posix(), "sha256": hashlib.sha256(content).hexdigest()}

    def _write(self, path: Path, content: bytes) -> None:
        try:
            write_whole(path, content, force=True)
        except AnyaccelError as error:
            raise AnyaccelError(error.message, hint=_MAKE_ROOM) from error

    def _add(self, row: BatchRow, facts: Mapping[str, Any]) -> None:
        entry = {"row": row.number, "prompt": row.prompt, "seed": row.seed, **row.call, **facts}
        try:
            self._file.write(_as_line(entry))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise AnyaccelError(
                f"{self.path / _MANIFEST} could not be written: {error.strerror}",
                hint=_MAKE_ROOM,
            ) from error
        self.entries[row.number] = entry


def _is_bare(path: Path) -> bool:
    """Whether it is where pictures go, without any: a batch that could not write down what it was of leaves that."""
    return path.name == _PICTURES and path.is_dir() and not any(path.iterdir())


def _as_line(document: Mapping[str, Any], indent: int | None = None) -> bytes:
    return (json.dumps(document, indent=indent, ensure_ascii=False) + "\n").encode()
