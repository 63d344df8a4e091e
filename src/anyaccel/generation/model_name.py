"""Resolution of model names: the embedded model, a local folder or a Hugging Face Hub ID.

The revision of a model is a Hub commit or a digest of its local files.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Literal

from anyaccel.embedded.model import NAME, find_embedded_model
from anyaccel.embedded.motion import VIDEO_NAME, find_motion_module, is_motion_module
from anyaccel.errors import ModelError, UsageError
from anyaccel.runtime.model_file_checks import check_model_folder
from anyaccel.upstream.modular_index import MODULAR_INDEX, is_modular_folder, read_modular_index

__all__ = ["ResolvedModel", "abbreviate_home", "digest_folder", "find_revision", "resolve_model"]

_INDEX = "model_index.json"
_INDEXES = (_INDEX, MODULAR_INDEX)
_SMALL_FILE_BYTES = 2**20
_SAMPLE_BYTES = 2**16


@dataclass(frozen=True, kw_only=True)
class ResolvedModel:
    """A model name resolved to its source (embedded, folder or Hub), before the model is loaded."""

    kind: Literal["embedded", "folder", "hub"]
    name: str
    """Name in image metadata, which `resolve_model` accepts again."""
    source: str
    """Argument for `from_pretrained`."""
    revision: str | None = None
    """Requested revision of a hub model."""
    with_motion: bool = False
    """Whether it is the embedded model with a motion module, which is then the source."""


def resolve_model(model: str | os.PathLike[str] | None = None, revision: str | None = None) -> ResolvedModel:
    """Resolve a model name without downloading or loading anything; None is the embedded model.

    Raise if the name is not valid, the files of a local model are not usable, or a revision is
    passed for a model that is not on the Hub.
    """
    if not isinstance(model, str | os.PathLike | None):
        raise UsageError(
            f"the model must be a string, a path or None, not {model!r:.60}",
            hint="pass a Hub ID, a folder, or None for the embedded model",
        )
    text = NAME if model is None else os.fspath(model)
    if not text.strip():
        raise UsageError(
            "the model name is empty", hint="pass a Hub ID or a folder, or omit the model to use the embedded model"
        )
    if text == NAME:
        resolved = ResolvedModel(kind="embedded", name=NAME, source=str(find_embedded_model()))
    elif text == VIDEO_NAME:
        resolved = ResolvedModel(kind="embedded", name=text, source=str(find_motion_module()), with_motion=True)
    elif is_motion_module(text):
        path = Path(text).expanduser()
        resolved = ResolvedModel(kind="embedded", name=abbreviate_home(path), source=str(path), with_motion=True)
    else:
        check_model_folder(text, pickles=False, trusted=False)
        path = Path(text).expanduser()
        # An existing path takes precedence over a Hub ID, as in diffusers.
        local = path.exists()
        kind: Literal["folder", "hub"] = "folder" if local else "hub"
        name = abbreviate_home(path) if local else text
        resolved = ResolvedModel(kind=kind, name=name, source=str(path) if local else text, revision=revision)
    if revision is not None and resolved.kind != "hub":
        raise UsageError(
            f"revision {revision!r} cannot be used with {resolved.name}, which is not a Hub model",
            hint="omit the revision, or pass a Hub ID",
        )
    return resolved


def abbreviate_home(path: Path) -> str:
    """Return the absolute path, with the home folder replaced by `~`."""
    # The path is stored in image files, which must not reveal the user name.
    absolute = path.absolute()
    home = Path(os.path.expanduser("~"))
    return f"~/{absolute.relative_to(home).as_posix()}" if absolute.is_relative_to(home) else str(absolute)


def find_revision(model: ResolvedModel) -> str | None:
    """Return a Hub model's commit hash, or a digest of a local model's files.

    Return None for a Hub model that is not in the local Hub cache.
    """
    if model.kind == "hub":
        from huggingface_hub import try_to_load_from_cache

        # The hub cache stores files under snapshots/COMMIT/.
        files = [try_to_load_from_cache(model.source, name, revision=model.revision) for name in _INDEXES]
        return next((Path(file).parent.name for file in files if isinstance(file, str)), None)
    if model.kind == "folder":
        return digest_folder(Path(model.source))
    return _digest_with_motion(Path(model.source)) if model.with_motion else _digest_embedded()


@functools.cache
def _digest_embedded() -> str:
    return digest_folder(find_embedded_model(), whole=True)


def _digest_with_motion(folder: Path) -> str:
    """Return a digest of the embedded model and a motion module."""
    digest = hashlib.sha256(_digest_embedded().encode())
    for file in sorted(folder.glob("*.*")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return f"sha256:{digest.hexdigest()[:16]}"


def digest_folder(folder: Path, *, whole: bool = False) -> str:
    """Return a SHA-256 digest (16 hex digits) of the names, sizes and contents of a pipeline's files.

    Unless `whole` is set, only the first, middle and last 64 KiB of files over 1 MiB are read. This
    detects different weights quickly, but does not protect against tampering.
    """
    digest = hashlib.sha256()
    for name, file in _list_model_files(folder):
        # The index of a modular pipeline contains the path of its folder, which does not change the images.
        content = _read_modular_index(folder) if name == MODULAR_INDEX else None
        size = file.stat().st_size if content is None else len(content)
        digest.update(f"{name}\0{size}\0".encode())
        if content is not None:
            digest.update(content)
            continue
        with file.open("rb") as stream:
            for block in _read_blocks(stream, size, whole or size <= _SMALL_FILE_BYTES):
                digest.update(block)
    return f"sha256:{digest.hexdigest()[:16]}"


def _list_model_files(folder: Path) -> list[tuple[str, Path]]:
    """Return the names and paths of the index and of the files of the components that it lists.

    Return only the path itself if it is a single-file checkpoint.
    """
    if is_modular_folder(folder):
        entries, _ = read_modular_index(folder)
        folders = {name: entry.folder for name, entry in entries.items() if entry.folder is not None}
        code = [(file.name, file) for file in sorted(folder.glob("*.py"))]  # of the user's blocks
        return [(MODULAR_INDEX, folder / MODULAR_INDEX), *code, *_list_component_files(folders)]
    if not (folder / _INDEX).is_file():
        return [(".", folder)] if folder.is_file() else []  # a single-file checkpoint
    index = json.loads((folder / _INDEX).read_text())
    if not isinstance(index, dict):
        raise ModelError(f"{folder / _INDEX} is not a JSON object", hint="copy or download the model again")
    # A component is a list [library, class]; other values are settings of the pipeline.
    names = [name for name, value in index.items() if isinstance(value, list)]
    return [(_INDEX, folder / _INDEX), *_list_component_files({name: folder / name for name in names})]


def _list_component_files(folders: Mapping[str, Path]) -> list[tuple[str, Path]]:
    files = [
        (f"{name}/{file.relative_to(folder).as_posix()}", file)
        for name, folder in folders.items()
        for file in folder.rglob("*")
        if file.is_file() and not file.name.startswith(".")
    ]
    return sorted(files, key=lambda item: PurePosixPath(item[0]))


def _read_modular_index(folder: Path) -> bytes:
    """Return the index of a modular pipeline, without the paths of components in local folders."""
    entries, values = read_modular_index(folder)
    components = {
        name: [entry.library, entry.kind, *([] if entry.folder else [entry.repository, entry.subfolder])]
        for name, entry in entries.items()
    }
    return json.dumps(values | components, sort_keys=True).encode()


def _read_blocks(stream: BinaryIO, size: int, whole: bool) -> Iterator[bytes]:
    if whole:
        while block := stream.read(_SMALL_FILE_BYTES):
            yield block
        return
    for offset in (0, size // 2, size - _SAMPLE_BYTES):
        stream.seek(offset)
        yield stream.read(_SAMPLE_BYTES)
