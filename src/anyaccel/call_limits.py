"""Validation of common call arguments: image sizes, steps, batch sizes and seeds.

NumPy integers are accepted; `True` and `2.0` are rejected.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from typing import Any

from anyaccel.errors import UsageError

__all__ = [
    "LARGEST_SEED",
    "SIDES",
    "check_batch",
    "check_frames",
    "check_multiple",
    "check_side",
    "check_steps",
    "parse_image_size",
    "read_seed",
    "read_seeds",
    "to_integer",
]

SIDES = ("height", "width")
LARGEST_SEED = 2**64 - 1
_LONGEST_SIDE = 16_384  # pixels; a sanity check, not a limit of a model
_LARGEST_BATCH = 1024
_MOST_FRAMES = 10_000  # a sanity check, as for the sides
_SIZE = re.compile(r"(?P<width>[0-9]{1,18})([x\N{MULTIPLICATION SIGN}](?P<height>[0-9]{1,18}))?", re.IGNORECASE)


def to_integer(value: Any) -> int | None:
    """Convert a Python or NumPy integer to `int`; return None for any other value."""
    if isinstance(value, bool):  # operator.index(True) is 1
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def check_side(name: str, value: Any, *, hint: str = "") -> int:
    """Return a height or width in pixels as an integer; raise if it is out of range."""
    side = to_integer(value)
    if side is None or not 1 <= side <= _LONGEST_SIDE:
        raise UsageError(
            f"{name} must be an integer from 1 to {_LONGEST_SIDE} pixels, not {value!r:.60}",
            hint=hint or f"for example {name}=512",
        )
    return side


def check_multiple(name: str, side: int, multiple: int) -> None:
    """Raise if a height or width is not a multiple of `multiple`."""
    if side % multiple:
        below = side // multiple * multiple
        raise UsageError(
            f"{name} must be a multiple of {multiple} for this model, not {side}",
            hint=f"use {below} or {below + multiple}" if below else f"use {multiple}",
        )


def parse_image_size(text: str) -> tuple[int, int]:
    """Parse an image size such as `512x768` into width and height; `512` means 512x512."""
    hint = "use WIDTHxHEIGHT in pixels, for example 512x768"
    # At most 18 digits: int() of a huge number would be slow.
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"invalid image size {text!r:.60}", hint=hint)
    width, height = int(match["width"]), int(match["height"] or match["width"])
    return check_side("width", width, hint=hint), check_side("height", height, hint=hint)


def check_steps(value: Any, *, hint: str = "for example num_inference_steps=20") -> int:
    """Return the number of denoising steps as an integer; raise if it is not a positive integer."""
    steps = to_integer(value)
    if steps is None or steps < 1:
        raise UsageError(f"the number of steps must be a positive integer, not {value!r:.60}", hint=hint)
    return steps


def check_batch(value: Any, *, hint: str = "for example batch=1") -> int:
    """Return the batch size as an integer; raise if it is out of range."""
    batch = to_integer(value)
    if batch is None or not 1 <= batch <= _LARGEST_BATCH:
        raise UsageError(f"the batch size must be an integer from 1 to {_LARGEST_BATCH}, not {value!r:.60}", hint=hint)
    return batch


def check_frames(value: Any, *, hint: str = "for example frames=81") -> int:
    """Return the number of frames of a video as an integer; raise if it is not a positive integer."""
    frames = to_integer(value)
    if frames is None or not 1 <= frames <= _MOST_FRAMES:
        raise UsageError(
            f"the number of frames must be an integer from 1 to {_MOST_FRAMES}, not {value!r:.60}", hint=hint
        )
    return frames


def read_seed(value: Any, *, hint: str = "for example seed=7") -> int:
    """Return a seed as an integer; raise if it is not between 0 and 2**64 - 1."""
    seed = to_integer(value)
    if seed is None or not 0 <= seed <= LARGEST_SEED:
        raise UsageError(f"a seed must be an integer from 0 to 2**64 - 1, not {value!r:.60}", hint=hint)
    return seed


def read_seeds(seed: Any, images: int) -> tuple[int, ...]:
    """Return one seed per image: the given list, or consecutive seeds starting at the given integer."""
    hint = "for example seed=7 or seed=[7, 8]"
    if not isinstance(seed, Sequence) or isinstance(seed, str):
        first = read_seed(seed, hint=hint)
        # Wraps around: the largest valid seed must also work for several images.
        return tuple((first + image) % (LARGEST_SEED + 1) for image in range(images))
    if len(seed) != images:
        raise UsageError(
            f"got {len(seed)} seed{'s' if len(seed) != 1 else ''} for {images} image{'s' if images != 1 else ''}",
            hint="pass one seed per image, or a single integer",
        )
    return tuple(read_seed(value, hint=hint) for value in seed)
