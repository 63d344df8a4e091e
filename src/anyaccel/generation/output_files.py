"""Names of generated files, and atomic writes.

Unless `force` is set, concurrent processes never overwrite each other's files; see
`anyaccel.storage.atomic_write`.
"""

from __future__ import annotations

import os
import re
import tempfile
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from anyaccel.errors import AnyaccelError, UsageError, nearest
from anyaccel.media.formats import SUFFIXES, default_suffix
from anyaccel.media.output import find_sidecar
from anyaccel.storage.atomic_write import atomic_write

if TYPE_CHECKING:
    from anyaccel.media.types import Kind

__all__ = ["Destination", "file_exists_error", "make_stem", "read_destination", "write_output_file", "write_unique"]

_MAX_STEM_LENGTH = 60
_MAX_ALTERNATIVES = 10_000


@dataclass(frozen=True, kw_only=True)
class Destination:
    """A folder for generated files, with a requested file name or names derived from the prompts."""

    folder: Path
    stem: str | None = None
    """Requested file name without suffix; None derives the name of each image from its prompt and seed."""
    suffix: str | None = None
    """Requested suffix; None selects the default format of the kind of media."""
    images: int = 1
    """Number of images; several images get a number appended to the stem."""
    force: bool = False
    """Whether existing files are overwritten."""

    def choose_suffix(self, kind: Kind) -> str:
        """Return the suffix for files with a kind of media."""
        return self.suffix or default_suffix(kind)

    def path_of(self, index: int, prompt: str, seed: int, kind: Kind = "image") -> Path:
        """Return the path for the image, video or audio at a zero-based index.

        A name that is derived from the prompt and seed may already exist.
        """
        suffix = self.choose_suffix(kind)
        if self.stem is None:
            return self.folder / f"{make_stem(prompt, kind)}-{seed}{suffix}"
        number = f"-{index + 1:0{len(str(self.images))}}" if self.images > 1 else ""
        return self.folder / f"{self.stem}{number}{suffix}"

    def sheet_path(self, prompt: str, seed: int, kind: Kind = "image") -> Path:
        """Return the path for the contact sheet, a grid of all images; its file name ends with `-grid`."""
        suffix = self.choose_suffix("image") if kind == "image" else default_suffix("image")
        return self.folder / f"{self.stem or f'{make_stem(prompt, kind)}-{seed}'}-grid{suffix}"

    def write(self, path: Path, content: bytes, sidecar: bytes | None = None) -> Path:
        """Write a file, creating the folder if necessary, and return its path.

        If the file exists and `force` is not set, a number is appended to a derived name. For a requested
        name, raise FileExistsError instead. `sidecar` is the content of the file with the metadata.
        """
        _make_folder(self.folder)
        if self.stem is None and not self.force:
            return write_unique(path, content, sidecar)
        write_output_file(path, content, force=self.force)
        _write_sidecar(path, sidecar)
        return path


def make_stem(prompt: str, default: str = "image") -> str:
    """Return a file name stem for a prompt, such as `a-red-apple`.

    Return `default` if the prompt has no letters or digits.
    """
    words = re.findall(r"[^\W_]+", unicodedata.normalize("NFC", prompt).lower())
    stem = ""
    for word in words:
        longer = f"{stem}-{word}" if stem else word[:_MAX_STEM_LENGTH]
        # File systems limit names to 255 bytes, and a letter can take 3 or more in UTF-8.
        if len(longer) > _MAX_STEM_LENGTH or len(longer.encode()) > 3 * _MAX_STEM_LENGTH:
            break
        stem = longer
    return stem or default


def read_destination(output: str | os.PathLike[str] | None, *, images: int, sheet: bool, force: bool) -> Destination:
    """Parse the `-o` option into a destination; raise if files cannot be written there.

    A path that ends with `/` or is an existing folder is a folder; any other path is a file. Call
    this before loading a model, so that a wrong path fails early. The check for existing files is
    repeated when an image is written.
    """
    text = "./" if output is None else os.fspath(output)
    path = Path(text).expanduser()
    # An empty path is the current folder. os.altsep is "/" on Windows and None elsewhere.
    ends_as_folder = not text or text.endswith(tuple(filter(None, ("/", os.sep, os.altsep))))
    if _find_kind(path) == "folder" or ends_as_folder:
        _check_folder(path, create=True)
        return Destination(folder=path, images=images, force=force)
    if path.suffix.lower() not in SUFFIXES:
        problem = f"has the unknown suffix {path.suffix!r}" if path.suffix else "has no suffix"
        raise UsageError(
            f"the output file {path} {problem}",
            hint=f"{nearest(path.suffix.lower(), SUFFIXES)}; to write to a folder, use {path.name}/",
        )
    _check_folder(path.parent, create=False)
    destination = Destination(folder=path.parent, stem=path.stem, suffix=path.suffix, images=images, force=force)
    kind = next(iter(SUFFIXES[path.suffix.lower()].kinds))
    files = [destination.path_of(index, "", 0) for index in range(images)] + [
        destination.sheet_path("", 0, kind)
    ] * sheet
    for file in files:
        _check_file(file, force)
    return destination


def _find_kind(path: Path) -> str | None:
    """Return `folder` or `file`, or None if the path does not exist. A broken symlink counts as a file."""
    try:
        # Not exists(), which is false for a broken link; writing there would replace the link.
        os.lstat(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # ValueError: the path contains a null byte
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            f"{path!s:.80} is not a valid file name: {reason}", hint="pass a different name to -o"
        ) from error
    return "folder" if path.is_dir() else "file"


def _check_file(path: Path, force: bool) -> None:
    kind = _find_kind(path)
    if kind == "folder":
        raise UsageError(f"cannot write the file {path}: it is a folder", hint=f"use {path}/ to write into the folder")
    if kind and not force:
        raise file_exists_error(path)


def file_exists_error(path: Path) -> UsageError:
    """Return the error to raise for an output file that already exists, with a hint to use `--force`."""
    return UsageError(
        f"{path} already exists", hint="overwrite it with --force (force=True), or choose a different name"
    )


def _check_folder(folder: Path, *, create: bool) -> None:
    """Raise UsageError if files cannot be written to a folder.

    A missing folder is an error unless `create` is set; then its closest existing parent must be
    writable.
    """
    kind = _find_kind(folder)
    if kind == "file":
        raise UsageError(f"{folder} is a file, not a folder", hint="pass a different path to -o")
    if kind is None and not create:
        raise UsageError(f"the folder {folder} does not exist", hint=f"create it with `mkdir -p {folder}`")
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    try:
        # Permission bits are not reliable (ACLs, read-only mounts, root), so create a file to find out.
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(
            f"the folder {existing} is not writable: {reason}", hint="choose a different folder with -o FOLDER/"
        ) from error


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _write_error(folder, error) from error


def write_output_file(path: Path, content: bytes, *, force: bool = False) -> None:
    """Write a file atomically; raise FileExistsError if it exists and `force` is not set."""
    try:
        atomic_write(path, content, overwrite=force)
    except FileExistsError:
        raise
    except OSError as error:
        raise _write_error(path, error) from error


def write_unique(path: Path, content: bytes, sidecar: bytes | None = None) -> Path:
    """Write a file and return its path; if the path exists, append a number, as in `apple-2.png`.

    `sidecar` is the content of the file with the metadata.
    """
    for candidate in _alternatives(path):
        # Saves writing a temporary file per taken name; the write below is the check that counts.
        if not os.path.lexists(candidate):
            try:
                write_output_file(candidate, content)
            except FileExistsError:  # another process created it after the check
                continue
            _write_sidecar(candidate, sidecar)
            return candidate
    raise AnyaccelError(
        f"{path} and all alternative names up to {path.stem}-{_MAX_ALTERNATIVES - 1}{path.suffix} already exist",
        hint="choose a different name with -o",
    )


def _write_sidecar(path: Path, sidecar: bytes | None) -> None:
    if sidecar is not None:
        write_output_file(find_sidecar(path), sidecar, force=True)


def _alternatives(path: Path) -> Iterator[Path]:
    yield path
    for number in range(2, _MAX_ALTERNATIVES):
        yield path.with_name(f"{path.stem}-{number}{path.suffix}")


def _write_error(path: Path, error: OSError) -> AnyaccelError:
    reason = error.strerror or str(error)
    return AnyaccelError(
        f"cannot write {path}: {reason}; no partial file remains",
        hint="free disk space or choose a different location with -o; rerun with the same seed to get the same image",
    )
