"""Search for the largest size that a model's config supports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from anyaccel.explanation.call_arguments import CallSize

__all__ = ["find_supported_size"]

# A multiple of this number of pixels suits every pipeline whose recipe does not set a size.
_STEP = 64


def find_supported_size(
    works: Callable[[CallSize], bool], requested: CallSize, recipe_call: dict[str, Any], frames_argument: str | None
) -> CallSize | None:
    """Return the largest size with the aspect ratio of `requested` for which `works` returns True, or None.

    `requested` itself does not work. Rotary and positional tables, for example, limit the size. The recipe's
    arguments work with a tiny model, so the sizes that are tried are multiples of its size, and its number of frames
    is used if no size works with the requested number.
    """
    size = requested.size
    if size is None:
        return None
    step = max(
        (side for side in (recipe_call.get("width"), recipe_call.get("height")) if isinstance(side, int)), default=_STEP
    )
    for frames in _list_frames(requested, recipe_call, frames_argument):
        if frames != requested.frames and works(replace(requested, frames=frames)):
            return replace(requested, frames=frames)
        # Invariant: `low` steps work (0: not tried yet) and `high` steps do not.
        low, high = 0, max(1, max(size) // step)
        if works(replace(requested, size=_scale(size, 1, step), frames=frames)):
            low = 1
        while low and high - low > 1:
            middle = (low + high) // 2
            low, high = (
                (middle, high)
                if works(replace(requested, size=_scale(size, middle, step), frames=frames))
                else (low, middle)
            )
        if low:
            return replace(requested, size=_scale(size, low, step), frames=frames)
    return None


def _list_frames(requested: CallSize, recipe_call: dict[str, Any], frames_argument: str | None) -> Iterator[int | None]:
    yield requested.frames
    frames = recipe_call.get(frames_argument) if frames_argument else None
    if isinstance(frames, int) and requested.frames is None:
        yield frames


def _scale(size: tuple[int, int], steps: int, step: int) -> tuple[int, int]:
    """Return a size with about the same aspect ratio and a longer side of `steps` × `step` pixels."""
    width, height = (max(1, round(side * steps / max(size))) * step for side in size)
    return width, height
