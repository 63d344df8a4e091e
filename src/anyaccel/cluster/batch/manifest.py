"""Output folder of a batch: `run.json`, the images, and `manifest.jsonl` with a line per finished row.

Each image is written atomically before its manifest line. If the process dies in between, the next
run recognizes the image by its embedded metadata and adds the missing line.
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
from anyaccel.errors import AnyaccelError, UsageError, summarize_error
from anyaccel.generation.adapters import read_additions
from anyaccel.generation.image_format import read_metadata
from anyaccel.generation.inputs import INPUT_PARAMETERS
from anyaccel.generation.output_files import make_stem, write_output_file
from anyaccel.generation.recorded_files import record_adapters
from anyaccel.media.output import find_sidecar
from anyaccel.storage.atomic_write import remove_temporary_files
from anyaccel.storage.file_lock import lock_file

__all__ = ["OutputFolder"]

# The lock is a separate file: `run.json` is replaced atomically, and a lock would stay on the old file.
_RUN, _MANIFEST, _LOCK, _IMAGES = "run.json", "manifest.jsonl", ".lock", "images"
# Name of the image folder in version 0.1.
_V0_1_IMAGES = "pictures"
# Suffixes of the files: of images, of videos with and without PyAV, and of audio.
_SUFFIXES = (".png", ".mp4", ".webp", ".wav")
_FORMAT = 1
_FREE_SPACE = "free disk space, then run the same command again; finished images are reused"


class OutputFolder:
    """Output folder of a batch, locked for this process until it is closed."""

    def __init__(self, path: Path, run: Mapping[str, Any]) -> None:
        """Open a new or empty folder, or resume a run that was started with the same `run` values.

        `run` contains everything that determines the images, such as the input and the model.
        """
        self.path = path
        # A folder of version 0.1 continues with its name, since the paths in its manifest contain it.
        continues_v0_1 = (path / _V0_1_IMAGES).is_dir() and not (path / _IMAGES).exists()
        self._images = path / (_V0_1_IMAGES if continues_v0_1 else _IMAGES)
        self._create()
        self._lock = lock_file(
            path / _LOCK,
            f"another process is writing to {path}",
            "wait until it finishes, or pass a different folder to --out",
        )
        self.run: dict[str, Any] = {"format": _FORMAT, **run}
        try:
            # The lock is held, so no other process can be writing these files.
            remove_temporary_files(path, older_than_s=0)
            remove_temporary_files(self._images, older_than_s=0)
            self._load_run()
            self.entries = self._read_manifest()
            self._file: IO[bytes] = (path / _MANIFEST).open("ab")
        except BaseException:
            self._lock.close()
            raise

    def close(self) -> None:
        """Close the manifest and release the lock."""
        # Closing flushes a line that failed to be written. That error was raised before; all other lines are on disk.
        with contextlib.suppress(OSError):
            self._file.close()
        self._lock.close()

    def compact(self) -> None:
        """Keep only the last manifest line per row; do nothing if no rows were retried."""
        path = self.path / _MANIFEST
        # Only at the end: during a run, lines are appended, and a crash damages at most the last one.
        if path.read_bytes().count(b"\n") > len(self.entries):
            self._file.close()
            self._write(path, b"".join(map(_as_line, self.entries.values())))
            self._file = path.open("ab")

    def __enter__(self) -> OutputFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def image_path(self, row: BatchRow, suffix: str = ".png") -> Path:
        """Return the path of the file for a batch row."""
        return self._images / f"{row.number:06}-{make_stem(row.prompt)}-{row.seed}{suffix}"

    def record_once(self, name: str, value: Any) -> Any:
        """Store a value in `run.json` unless `name` is already set; return the stored value."""
        if name not in self.run:
            self.run[name] = value
            self._write(self.path / _RUN, _as_line(self.run, indent=1))
        return self.run[name]

    def find_unfinished(self, rows: Iterable[BatchRow]) -> list[BatchRow]:
        """Return the rows that have no valid image yet, including rows that failed in an earlier run."""
        unfinished = []
        for row in rows:
            entry = self.entries.get(row.number)
            if entry is not None and "error" not in entry and self._is_intact(row, entry):
                continue
            if not self._recover(row):
                unfinished.append(row)
        return unfinished

    def add_image(
        self,
        row: BatchRow,
        content: bytes,
        facts: Mapping[str, Any],
        suffix: str = ".png",
        sidecar: bytes | None = None,
    ) -> None:
        """Write a file, the one with its metadata if it has one, and its manifest line."""
        path = self.image_path(row, suffix)
        # First, because the next run recognizes a file without a manifest line by its metadata.
        if sidecar is not None:
            self._write(find_sidecar(path), sidecar)
        self._write(path, content)
        self._add(row, {**self._path_and_digest(path, content), **facts})

    def add_failure(self, row: BatchRow, error: str, facts: Mapping[str, Any]) -> None:
        """Append a line with the error message for a failed row to `manifest.jsonl`."""
        self._add(row, {"error": error, **facts})

    def _create(self) -> None:
        """Create the output folder; raise if the path is a file or contains unrelated files."""
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"{self.path} is a file, not a folder", hint="pass a different path to --out")
        if self.path.is_dir() and not (self.path / _RUN).exists():
            names = sorted(
                path.name
                for path in self.path.iterdir()
                if not path.name.startswith(".") and not _is_empty_image_folder(path)
            )
            if names:
                remaining = f" and {len(names) - 3} more" if len(names) > 3 else ""
                raise UsageError(
                    f"{self.path} is not empty and has no {_RUN} from an earlier batch: "
                    f"it contains {', '.join(names[:3])}{remaining}",
                    hint="pass a new or empty folder to --out",
                )
        try:
            self._images.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"cannot create the folder {self.path}: {error.strerror}", hint="pass a different path to --out"
            ) from error

    def _load_run(self) -> None:
        path = self.path / _RUN
        if not path.exists() or self._is_unused():
            self._write(path, _as_line(self.run, indent=1))
            return
        try:
            stored = json.loads(path.read_bytes())
            assert isinstance(stored, dict)
        except (ValueError, AssertionError) as error:
            raise UsageError(f"{path} is not a JSON object", hint="pass a different folder to --out") from error
        for name, value in self.run.items():
            if stored.get(name) != value:
                reason = (
                    "the input is different" if name == "input" else f"{name} was {stored.get(name)} and is now {value}"
                )
                raise UsageError(
                    f"{self.path} belongs to a different run: {reason}",
                    hint="pass a different folder to --out, or use the input and options of that run",
                )
        self.run = stored

    def _is_unused(self) -> bool:
        """Return whether the folder has no results yet; if so, a run with different options may use it."""
        manifest = self.path / _MANIFEST
        size = manifest.stat().st_size if manifest.exists() else 0
        return not size and not any(self._images.iterdir())

    def _read_manifest(self) -> dict[int, dict[str, Any]]:
        """Return the last manifest line for each row, keyed by row number.

        An incomplete last line, left by a crash, is removed from the file. Any other invalid line raises
        UsageError.
        """
        path = self.path / _MANIFEST
        if not path.exists():
            return {}
        content = path.read_bytes()
        complete = content[: content.rfind(b"\n") + 1]
        if len(complete) < len(content):
            os.truncate(path, len(complete))
        entries: dict[int, dict[str, Any]] = {}
        for number, line in enumerate(complete.splitlines(), 1):
            try:
                entry = json.loads(line)
                entries[entry["row"]] = entry
            except (ValueError, KeyError, TypeError) as error:
                raise UsageError(
                    f"line {number} of {path} is not a manifest entry: {summarize_error(error)}",
                    hint="delete this line, or pass a different folder to --out",
                ) from error
        return entries

    def _is_intact(self, row: BatchRow, entry: Mapping[str, Any]) -> bool:
        """Return whether the image listed in a manifest line exists, is unchanged, and has the row's seed."""
        try:
            content = (self.path / entry["path"]).read_bytes()
        except (OSError, KeyError, TypeError, ValueError):
            return False
        return hashlib.sha256(content).hexdigest() == entry.get("sha256") and entry.get("seed") == row.seed

    def _recover(self, row: BatchRow) -> bool:
        """Add the missing manifest line if the row's image already exists; return whether it was added.

        The metadata in the image file must match the row and the run.
        """
        path = next((path for suffix in _SUFFIXES if (path := self.image_path(row, suffix)).exists()), None)
        if path is None:
            return False
        try:
            (metadata,) = read_metadata(path)
            arguments = metadata.arguments()
            adapters = record_adapters(read_additions(**row.additions).adapters)
        except (UsageError, ValueError):
            return False
        expected = {"prompt": row.prompt, "seed": row.seed, **row.call}
        values = {name: _expand_paths(name, value) for name, value in arguments.items()}
        if any(values.get(name) != _expand_paths(name, value) for name, value in expected.items()):
            return False
        if metadata.model != self.run["model"] or list(metadata.adapters) != list(adapters):
            return False
        if metadata.requested_scheduler != read_additions(**row.additions).scheduler:
            return False
        if metadata.weights != self.run.get("weights"):
            return False
        # The run has these two only after the first worker has loaded the model.
        if any(getattr(metadata, name) != self.run.get(name) for name in ("revision", "dtype") if name in self.run):
            return False
        facts = {"device": metadata.device, "dtype": metadata.dtype}
        self._add(row, {**self._path_and_digest(path, path.read_bytes()), **facts})
        return True

    def _path_and_digest(self, path: Path, content: bytes) -> dict[str, Any]:
        return {"path": path.relative_to(self.path).as_posix(), "sha256": hashlib.sha256(content).hexdigest()}

    def _write(self, path: Path, content: bytes) -> None:
        try:
            write_output_file(path, content, force=True)
        except AnyaccelError as error:
            raise AnyaccelError(error.message, hint=_FREE_SPACE) from error

    def _add(self, row: BatchRow, facts: Mapping[str, Any]) -> None:
        entry = {"row": row.number, "prompt": row.prompt, "seed": row.seed, **row.call, **row.additions, **facts}
        try:
            self._file.write(_as_line(entry))
            self._file.flush()
            # A row counts as finished only when its line survives a power failure.
            os.fsync(self._file.fileno())
        except OSError as error:
            raise AnyaccelError(
                f"cannot write {self.path / _MANIFEST}: {error.strerror}",
                hint=_FREE_SPACE,
            ) from error
        self.entries[row.number] = entry


def _expand_paths(name: str, value: Any) -> Any:
    """Return the paths of an input as a list, without `~`; return other arguments unchanged."""
    if name not in INPUT_PARAMETERS:
        return value
    return [str(Path(str(item)).expanduser()) for item in (value if isinstance(value, list) else [value])]


def _is_empty_image_folder(path: Path) -> bool:
    """Return whether a path is an empty image folder left by a batch that could not write `run.json`."""
    return path.name in (_IMAGES, _V0_1_IMAGES) and path.is_dir() and not any(path.iterdir())


def _as_line(document: Mapping[str, Any], indent: int | None = None) -> bytes:
    return (json.dumps(document, indent=indent, ensure_ascii=False) + "\n").encode()
