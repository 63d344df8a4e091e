"""The model that a user names: the embedded one, a folder, or a hub id; and which version of it that is."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from anyaccel.embedded.model import NAME, find_embedded_model
from anyaccel.errors import UsageError
from anyaccel.runtime.model_files import check_model_folder

__all__ = ["ResolvedModel", "digest_folder", "find_revision", "resolve_model"]

_INDEX = "model_index.json"
_SMALL_BYTES = 2**20
_SAMPLE_BYTES = 2**16


@dataclass(frozen=True, kw_only=True)
class ResolvedModel:
    """A model, before it is loaded."""

    kind: Literal["embedded", "folder", "hub"]
    name: str
    """What a picture's record says: it can be given as the model again."""
    source: str
    """What diffusers loads it from."""
    revision: str | None = None
    """The commit of a hub's model that was asked for."""


def resolve_model(model: str | os.PathLike[str] | None = None, revision: str | None = None) -> ResolvedModel:
    """Find the model that is meant; a folder is looked into, and nothing is downloaded or loaded."""
    if not isinstance(model, str | os.PathLike | None):
        raise UsageError(f"{model!r} is no model", hint="give a hub id, a folder, or nothing for the embedded one")
    text = NAME if model is None else os.fspath(model)
    if not text.strip():
        raise UsageError("the model has no name", hint="give a hub id, a folder, or nothing for the embedded one")
    if text == NAME:
        found = ResolvedModel(kind="embedded", name=NAME, source=str(find_embedded_model()))
    else:
        check_model_folder(text, pickles=False, trusted=False)
        path = Path(text).expanduser()
        local = path.exists()
        kind: Literal["folder", "hub"] = "folder" if local else "hub"
        name = _abbreviate(path) if local else text
        found = ResolvedModel(kind=kind, name=name, source=str(path) if local else text, revision=revision)
    if revision is not None and found.kind != "hub":
        raise UsageError(f"{found.name} is no model of the hub's, and has no revisions", hint="leave revision out")
    return found


def _abbreviate(path: Path) -> str:
    """The whole path with `~` for the user's folder: a picture that is passed on names no user."""
    whole = path.absolute()
    home = Path(os.path.expanduser("~"))
    return f"~/{whole.relative_to(home).as_posix()}" if whole.is_relative_to(home) else str(whole)


def find_revision(model: ResolvedModel) -> str | None:
    """Which version of a model this is: a commit of the hub's where it is known, else a digest of the files."""
    if model.kind == "hub":
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model.source, _INDEX, revision=model.revision)
        return Path(found).parent.name if isinstance(found, str) else None
    return _digest_embedded() if model.kind == "embedded" else digest_folder(Path(model.source))


@functools.cache
def _digest_embedded() -> str:
    return digest_folder(find_embedded_model(), whole=True)


def digest_folder(folder: Path, *, whole: bool = False) -> str:
    """A digest of the files that a pipeline is loaded from: their names, their sizes and what is in them.

    Of a file over 1 MiB it reads the beginning, the middle and the end, 64 KiB each, unless the whole is asked for: it
    notices other weights at once, and is no proof against one who forges them.
    """
    digest = hashlib.sha256()
    for file in _model_files(folder):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(folder).as_posix()}\0{size}\0".encode())
        with file.open("rb") as stream:
            for part in _read_parts(stream, size, whole or size <= _SMALL_BYTES):
                digest.update(part)
    return f"sha256:{digest.hexdigest()[:16]}"


def _model_files(folder: Path) -> list[Path]:
    """The index, and the files of the components that it names: what else lies in the folder is not the model."""
    if not (folder / _INDEX).is_file():
        return [folder] if folder.is_file() else []
    names = [name for name, part in json.loads((folder / _INDEX).read_text()).items() if isinstance(part, list)]
    inside = [file for name in names for file in (folder / name).rglob("*")]
    return [folder / _INDEX, *sorted(file for file in inside if file.is_file() and not file.name.startswith("."))]


def _read_parts(stream: BinaryIO, size: int, whole: bool) -> Iterator[bytes]:
    if whole:
        while part := stream.read(_SMALL_BYTES):
            yield part
        return
    for place in (0, size // 2, size - _SAMPLE_BYTES):
        stream.seek(place)
        yield stream.read(_SAMPLE_BYTES)
