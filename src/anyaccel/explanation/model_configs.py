"""The model that is asked about, by its small files alone: the embedded one, a folder, a description, or a hub id."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from anyaccel.embedded.model import NAME, find_embedded_model
from anyaccel.errors import ModelError, first_line, nearest
from anyaccel.explanation.known_models import described_models, find_description
from anyaccel.tracing.model_index import ModelFolder, read_model_folder

__all__ = ["find_model"]

_SMALL = ("*.json", "*.txt", "*.model")
_LARGE = ("*.safetensors", "*.bin", "*.ckpt", "*.pt", "*.pth", "*.onnx*", "*.msgpack", "*.gguf")


def find_model(model: str | os.PathLike[str], revision: str | None = None) -> ModelFolder:
    """Read a model's small files; of a hub's model only those are fetched."""
    text = os.fspath(model)
    if not text.strip():
        raise ModelError("the model has no name", hint=f"give a hub id, a folder, or `{NAME}`")
    if text == NAME:
        return read_model_folder(find_embedded_model())
    path = Path(text).expanduser()
    if path.is_dir():
        if not (path / "model_index.json").is_file():
            raise ModelError(f"{text} is no pipeline: it has no model_index.json", hint="give the folder of a pipeline")
        return read_model_folder(path)
    if path.exists():
        raise ModelError(f"{text} is a file, and a pipeline is a folder", hint="give the folder of a pipeline")
    described = find_description(text) if revision is None else None
    if described is not None:
        return read_model_folder(described)
    if text.startswith((".", "/", "~")) or text.count("/") != 1:
        raise ModelError(
            f"{text} is no folder, and no id of a hub's model", hint=nearest(text, [NAME, *described_models()])
        )
    return read_model_folder(_fetch(text, revision))


@functools.cache
def _fetch(name: str, revision: str | None) -> Path:
    """The small files of a hub's model: configs and vocabularies, no weights."""
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            name, revision=revision, allow_patterns=list(_SMALL), ignore_patterns=list(_LARGE), max_workers=4
        )
    except Exception as error:
        raise ModelError(
            f"the small files of {name} cannot be had: {first_line(error)}",
            hint=f"is it spelled right, and is there a network? with no network: {', '.join(described_models())}",
        ) from error
    if not (Path(folder) / "model_index.json").is_file():
        raise ModelError(f"{name} is no pipeline: it has no model_index.json", hint="give the id of a pipeline")
    return Path(folder)
