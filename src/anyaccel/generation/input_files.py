"""Inputs of `generate`: files, PIL images and arrays, with the digests that `--from` verifies."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyaccel.errors import UsageError
from anyaccel.generation.inputs import GENERIC_INPUTS, INPUT_OPTIONS, INPUT_PARAMETERS, InputMedia
from anyaccel.generation.model_name import abbreviate_home

if TYPE_CHECKING:
    from anyaccel.media.types import Kind

__all__ = ["digest_file", "find_file", "read_inputs"]

# Inputs are files of the user; the limits only prevent that a wrong or hostile file exhausts the memory.
_MAX_PIXELS = 16_384 * 16_384
_MAX_FRAMES = 10_000
_MAX_SECONDS = 3600.0
_VIDEO_SUFFIXES = (".mp4", ".webm", ".mov", ".mkv", ".avi", ".m4v", ".gif")
# Inputs that may be an image or a video.
_EITHER = ("control_image",)
_BLOCK_BYTES = 2**20


def read_inputs(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the call with each input read: a path, a PIL image, an array or a list of these.

    Tensors are returned unchanged. Raise UsageError for a file that cannot be read.
    """
    return {name: _read_argument(name, value) for name, value in call.items()}


def _read_argument(name: str, value: Any) -> Any:
    kind: Kind | None = INPUT_PARAMETERS.get(name)
    if kind is None or value is None:
        return value
    if kind == "video" and isinstance(value, list | tuple) and not any(map(_is_path, value)):
        return _wrap_frames(value)
    if isinstance(value, list | tuple):
        items = tuple(_read_item(name, kind, item) for item in value)
        if name in GENERIC_INPUTS and not items:
            raise UsageError(f"{name} is an empty list", hint=f"pass a file, or omit {INPUT_OPTIONS[name]}")
        return items if all(isinstance(item, InputMedia) for item in items) else value
    return _read_item(name, kind, value)


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike)


def _wrap_frames(frames: Any) -> Any:
    """Return a list of PIL images as a video; return other lists, such as one of tensors, unchanged."""
    from PIL import Image

    from anyaccel.media.types import Video

    if not frames or not all(isinstance(frame, Image.Image) for frame in frames):
        return frames
    return InputMedia(kind="video", media=Video(list(frames), 16.0))


def _read_item(name: str, kind: Kind, value: Any) -> Any:
    from PIL import Image

    from anyaccel.media.types import Audio, Video

    if isinstance(value, InputMedia):
        return value
    if _is_path(value):
        return _read_file(name, kind, Path(value))
    if isinstance(value, Image.Image):
        return InputMedia(kind="image", media=value)
    if isinstance(value, Video):
        return InputMedia(kind="video", media=value)
    if isinstance(value, Audio):
        return InputMedia(kind="audio", media=value)
    # An array of height, width and channels with integers from 0 to 255; diffusers itself takes others.
    if kind == "image" and str(getattr(value, "dtype", "")) == "uint8" and getattr(value, "ndim", 0) in (2, 3):
        return InputMedia(kind="image", media=Image.fromarray(value))
    return value


def _read_file(name: str, kind: Kind, path: Path) -> InputMedia:
    from anyaccel.media.decode import decode_audio, decode_image, decode_video

    file = find_file(path, INPUT_OPTIONS.get(name, name))
    if name in _EITHER and file.suffix.lower() in _VIDEO_SUFFIXES:
        kind = "video"
    media: Any
    if kind == "video":
        media = decode_video(file, max_frames=_MAX_FRAMES, max_pixels=_MAX_PIXELS)
    elif kind == "audio":
        media = decode_audio(file, max_seconds=_MAX_SECONDS)
    else:
        media = decode_image(file, max_pixels=_MAX_PIXELS)
        # As `diffusers.utils.load_image`.
        media = media if media.mode in ("RGB", "L") else media.convert("RGB")
    return InputMedia(kind=kind, media=media, path=abbreviate_home(file), sha256=digest_file(file))


def find_file(path: Path, option: str) -> Path:
    """Return the path of an input file; raise UsageError if it is a URL or does not exist."""
    text = str(path)
    if text.startswith(("http:/", "https:/", "data:")):
        raise UsageError(f"{option} is a URL: {text:.60}", hint="download it, and pass the path of the file")
    file = path.expanduser()
    try:
        exists = file.exists()
    except (OSError, ValueError) as error:  # too long, or with a null byte
        raise UsageError(f"{text!r:.80} is not a valid file name", hint=f"pass a different file to {option}") from error
    if not exists:
        raise UsageError(f"the file {text} of {option} does not exist", hint="check the path")
    return file


def digest_file(path: Path) -> str:
    """Return the SHA-256 digest of a file, or of the names and contents of the files in a folder."""
    digest = hashlib.sha256()
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    for file in files:
        if path.is_dir():
            digest.update(f"{file.relative_to(path).as_posix()}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            while block := stream.read(_BLOCK_BYTES):
                digest.update(block)
    return digest.hexdigest()
