"""Config files for `explain`, from the embedded model, a folder, a bundled model or the Hub."""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from anyaccel.embedded.model import NAME, find_embedded_model
from anyaccel.embedded.motion import VIDEO_NAME, find_motion_module, is_motion_module, read_video_index
from anyaccel.errors import ModelError, first_line, nearest
from anyaccel.explanation.known_models import find_bundled_configs, list_bundled_models
from anyaccel.explanation.modular_folder import read_modular_folder
from anyaccel.runtime.model_file_checks import INDEXES, check_index
from anyaccel.tracing.model_folder import Component, ModelFolder, read_json, read_model_folder
from anyaccel.upstream.modular_index import MODULAR_INDEX, is_modular_folder

__all__ = ["find_model"]

# Tokenizers need their vocabularies (`*.txt`, `*.model`) besides the JSON files.
_CONFIG_PATTERNS = ("*.json", "*.txt", "*.model")
_WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.ckpt", "*.pt", "*.pth", "*.onnx*", "*.msgpack", "*.gguf")


def find_model(model: str | os.PathLike[str], revision: str | None = None) -> ModelFolder:
    """Read a model's config files from a folder, the bundled models or the Hub.

    From the Hub, only configs and tokenizer vocabularies are downloaded, not weights. Raises ModelError
    if there is no such model.
    """
    text = os.fspath(model)
    if not text.strip():
        raise ModelError("the model name is empty", hint=f"pass a Hub ID, a folder, or `{NAME}` for the embedded model")
    if text == NAME:
        return read_model_folder(find_embedded_model())
    path = find_motion_module() if text == VIDEO_NAME else Path(text).expanduser()
    if is_motion_module(path):
        return _read_folder_with_motion(path)
    if path.is_dir():
        if is_modular_folder(path):
            return _read_modular_folder(path)
        if not (path / "model_index.json").is_file():
            raise ModelError(
                f"{text} is not a pipeline folder: it has no model_index.json and no {MODULAR_INDEX}",
                hint="pass a folder that contains one of these files",
            )
        return read_model_folder(path)
    if path.exists():
        raise ModelError(
            f"{text} is a file, not a pipeline folder", hint="pass a folder that contains model_index.json"
        )
    # The bundled configs belong to one revision, so another one needs the network.
    bundled = find_bundled_configs(text) if revision is None else None
    if bundled is not None:
        return read_model_folder(bundled)
    # A misspelled path must not become a request to the hub.
    if text.startswith((".", "/", "~")) or text.count("/") != 1:
        raise ModelError(
            f"{text} is neither an existing folder nor a Hub ID", hint=nearest(text, [NAME, *list_bundled_models()])
        )
    downloaded = _download_configs(text, revision)
    return _read_modular_folder(downloaded) if is_modular_folder(downloaded) else read_model_folder(downloaded)


def _read_folder_with_motion(path: Path) -> ModelFolder:
    """Read the config files of the embedded model and of a motion module for it."""
    images, index = read_model_folder(find_embedded_model()), read_video_index()
    library, kind = index["motion_adapter"]
    file = path / "config.json"
    adapter = Component(name="motion_adapter", library=library, kind=kind, config=read_json(file), file=file)
    components = [_add_motion(item, adapter) if item.name == "unet" else item for item in images.components]
    return ModelFolder(
        path=images.path,
        pipeline=index["_class_name"],
        components=(*(component for component in components if component.name in index), adapter),
        switches={},
        folders={"motion_adapter": path},
    )


def _add_motion(unet: Component, adapter: Component) -> Component:
    """Return the UNet to which the pipeline converts a UNet for images and a motion module."""
    import diffusers
    import torch

    library: Any = diffusers
    with torch.device("meta"):
        images = library.UNet2DConditionModel.from_config(dict(unet.config or {}))
        motion = library.MotionAdapter.from_config(dict(adapter.config or {}))
        converted = library.UNetMotionModel.from_unet2d(images, motion, load_weights=False)
    return replace(unet, kind=type(converted).__name__, config=dict(converted.config))


def _read_modular_folder(path: Path) -> ModelFolder:
    check_index(path / MODULAR_INDEX, trusted=False)
    return read_modular_folder(path)


@functools.cache
def _download_configs(name: str, revision: str | None) -> Path:
    """Download the configs and tokenizer vocabularies of a Hub model, and return their folder."""
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(_CONFIG_PATTERNS),
            ignore_patterns=list(_WEIGHT_PATTERNS),
            max_workers=4,
        )
    except Exception as error:  # the hub, the network and the file system raise many kinds of errors
        raise ModelError(
            f"cannot download the config files of {name}: {first_line(error)}",
            hint="check the model name and the network connection; models available offline: "
            f"{', '.join(list_bundled_models())}",
        ) from error
    if not any((Path(folder) / index).is_file() for index in INDEXES):
        raise ModelError(
            f"{name} is not a pipeline: it has no model_index.json",
            hint="pass the Hub ID of a diffusers pipeline, such as stable-diffusion-v1-5/stable-diffusion-v1-5",
        )
    return Path(folder)
