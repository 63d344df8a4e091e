"""Kind and size of what a traced pipeline call generates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from anyaccel.planning.memory import OutputKind

__all__ = ["TracedOutput", "read_output"]

# Field of a pipeline's output, by kind. A video pipeline may also have audio.
_FIELDS: dict[str, OutputKind] = {"frames": "video", "videos": "video", "images": "image", "audios": "audio"}


@dataclass(frozen=True, kw_only=True)
class TracedOutput:
    """What one pipeline call generates: images, videos or audio."""

    kind: OutputKind = "image"
    size: tuple[int, int] | None = None
    """Width and height of an image or a video."""
    frames: int | None = None
    """The number of frames of a video."""
    samples: int | None = None
    """The number of samples of an audio clip."""


def read_output(result: Any) -> TracedOutput:
    """Return the kind and size of a pipeline's output, which the pipeline was asked to return as tensors."""
    field = next((name for name in _FIELDS if getattr(result, name, None) is not None), None)
    if field is None:
        return TracedOutput()
    kind, value = _FIELDS[field], getattr(result, field)
    shape = _read_shape(value)
    if kind == "audio":
        return TracedOutput(kind=kind, samples=shape[-1] if shape else None)
    size = (shape[-1], shape[-2]) if len(shape) >= 3 else None
    frames = shape[-4] if kind == "video" and len(shape) >= 4 else None
    return TracedOutput(kind=kind, size=size, frames=frames)


def _read_shape(value: Any) -> tuple[int, ...]:
    """Return the shape of a tensor, an array, or nested lists of them."""
    if isinstance(value, list | tuple):
        return (len(value), *_read_shape(value[0])) if value else ()
    return tuple(value.shape) if isinstance(value, torch.Tensor) or hasattr(value, "shape") else ()
