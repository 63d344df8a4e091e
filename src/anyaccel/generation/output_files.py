"""The files that pictures are written to: their names, and writing them whole or not at all.

Two processes that write at once never overwrite one another: see `anyaccel.storage.atomic_write`.
"""

from __future__ import annotations

import os
import re
import tempfile
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from anyaccel.errors import AnyaccelError, UsageError, nearest
from anyaccel.generation.image_format import SUFFIXES
from anyaccel.storage.atomic_write import atomic_write

__all__ = ["Destination", "make_stem", "read_destination", "write_free", "write_whole"]

_LONGEST_STEM = 60
_MOST_OF_ONE_NAME = 10_000


@dataclass(frozen=True, kw_only=True)
class Destination:
    """Where pictures go: under names that were asked for, or under names that are made from their prompts."""

    folder: Path
    stem: str | None = None
    """The name that was asked for; None names each picture after its prompt and its seed."""
    suffix: str = ".png"
    pictures: int = 1
    force: bool = False

    def path_of(self, place: int, prompt: str, seed: int) -> Path:
        """The name of one picture, the first of them having place 0; a made-up one may be taken already."""
        if self.stem is None:
            return self.folder / f"{make_stem(prompt)}-{seed}{self.suffix}"
        number = f"-{place + 1:0{len(str(self.pictures))}}" if self.pictures > 1 else ""
        return self.folder / f"{self.stem}{number}{self.suffix}"

    def sheet_path(self, prompt: str, seed: int) -> Path:
        """The name of the contact sheet."""
        return self.folder / f"{self.stem or f'{make_stem(prompt)}-{seed}'}-grid{self.suffix}"

    def write(self, path: Path, content: bytes) -> Path:
        """Write a picture there, or under the next free name where the name was made up; gives the name."""
        _make_folder(self.folder)
        if self.stem is None and not self.force:
            return write_free(path, content)
        write_whole(path, content, force=self.force)
        return path


def make_stem(prompt: str) -> str:
    """A file's name from a prompt: `a-red-apple` from "A red apple!", `picture` where no letter or digit is left."""
    words = re.findall(r"[^\W_]+", unicodedata.normalize("NFC", prompt).lower())
    stem = ""
    for word in words:
        longer = f"{stem}-{word}" if stem else word[:_LONGEST_STEM]
        if len(longer) > _LONGEST_STEM or len(longer.encode()) > 3 * _LONGEST_STEM:
            break
        stem = longer
    return stem or "picture"


def read_destination(output: str | os.PathLike[str] | None, *, pictures: int, sheet: bool, force: bool) -> Destination:
    """Where pictures are to go, by `-o`: a file, or a folder if it ends with / or is one; raises if they cannot.

    This is asked before a model is loaded. What is found then may have changed when the pictures are written.
    """
    text = "./" if output is None else os.fspath(output)
    path = Path(text).expanduser()
    ends_as_folder = not text or text.endswith(tuple(filter(None, ("/", os.sep, os.altsep))))
    if _look(path) == "folder" or ends_as_folder:
        _check_folder(path, may_be_made=True)
        return Destination(folder=path, pictures=pictures, force=force)
    if path.suffix.lower() not in SUFFIXES:
        ending = f"not {path.suffix}" if path.suffix else "and this has none"
        close = nearest(path.suffix.lower(), SUFFIXES)
        raise UsageError(
            f"a picture's name ends with .png, .jpg, .jpeg or .webp, {ending}: {path}",
            hint=f"{close}; a folder is written {path.name}/",
        )
    _check_folder(path.parent, may_be_made=False)
    found = Destination(folder=path.parent, stem=path.stem, suffix=path.suffix, pictures=pictures, force=force)
    names = [found.path_of(place, "", 0) for place in range(pictures)] + [found.sheet_path("", 0)] * sheet
    for name in names:
        _check_name(name, force)
    return found


def _look(path: Path) -> str | None:
    """What there is of that name, links not followed to their end: `folder`, `file`, or None for nothing."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{path!s:.80} cannot be a file: {reason}", hint="give another name to -o") from error
    return "folder" if path.is_dir() else "file"


def _check_name(path: Path, force: bool) -> None:
    found = _look(path)
    if found == "folder":
        raise UsageError(f"{path} is a folder", hint=f"write into it with {path}/")
    if found and not force:
        raise taken(path)


def taken(path: Path) -> UsageError:
    """The error that a name is taken."""
    return UsageError(f"{path} is there already", hint="--force (force=True) writes over it; or choose another name")


def _check_folder(folder: Path, *, may_be_made: bool) -> None:
    found = _look(folder)
    if found == "file":
        raise UsageError(f"{folder} is a file, and not a folder", hint="give another name")
    if found is None and not may_be_made:
        raise UsageError(f"there is no folder {folder}", hint=f"mkdir -p {folder}")
    nearest_one = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    try:
        tempfile.TemporaryFile(dir=nearest_one).close()  # only a try tells
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(
            f"nothing can be written into {nearest_one}: {reason}", hint="choose another folder with -o FOLDER/"
        ) from error


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_written(folder, error) from error


def write_whole(path: Path, content: bytes, *, force: bool = False) -> None:
    """Write a file whole or not at all; a name that is taken is a FileExistsError unless it may be written over."""
    try:
        atomic_write(path, content, overwrite=force)
    except FileExistsError:
        raise
    except OSError as error:
        raise _not_written(path, error) from error


def write_free(path: Path, content: bytes) -> Path:
    """Write a file under this name or, where that is taken, under the next free one: `apple-2.png`; gives the name."""
    for name in _alternatives(path):
        if not os.path.lexists(name):
            try:
                write_whole(name, content)
            except FileExistsError:  # another process was faster
                continue
            return name
    raise AnyaccelError(f"{path} and {_MOST_OF_ONE_NAME:,} names after it are taken", hint="choose another with -o")


def _alternatives(path: Path) -> Iterator[Path]:
    yield path
    for number in range(2, _MOST_OF_ONE_NAME):
        yield path.with_name(f"{path.stem}-{number}{path.suffix}")


def _not_written(path: Path, error: OSError) -> AnyaccelError:
    reason = error.strerror or str(error)
    return AnyaccelError(
        f"{path} could not be written: {reason}; nothing is left of it",
        hint="make room or choose another place with -o; the same seed gives the same picture again",
    )
