"""Search for the largest image size that fits in memory, by interpolation and, if needed, bisection."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["LARGEST_SIDE", "choose_largest_side", "find_largest_size"]

Size = tuple[int, int]
_STEP = 128
# Upper ends of the search; few models generate larger images. Tracing a large video takes many seconds.
LARGEST_SIDE = 4096
_LARGEST_VIDEO_SIDE = 1536
# The same, as a multiple of the model's default side. A small model decodes a large image in thousands of small tiles,
# which take minutes to trace.
_LARGEST_SCALE = 8
# Relative error of a prediction above which the next size comes from bisection.
_GUESS_TOLERANCE = 0.1


def choose_largest_side(default: Size | None, *, is_video: bool) -> int:
    """Return the longest side of the sizes to try, for a model with this default size (None: unknown)."""
    largest = _LARGEST_VIDEO_SIDE if is_video else LARGEST_SIDE
    return largest if default is None else min(largest, max(_STEP, max(default) * _LARGEST_SCALE))


def find_largest_size(
    need: Callable[[Size], int | None],
    requested: Size,
    capacity_bytes: int,
    largest_side: int = LARGEST_SIDE,
    *,
    fixed_bytes: int = 0,
    requested_bytes: int | None = None,
) -> Size | None:
    """Return the largest size that fits in memory at the aspect ratio of `requested`, or None.

    Sizes are tried in steps of 128 pixels. `need` returns the number of bytes that a size requires, or
    None if the model cannot generate it. Apart from its aspect ratio, `requested` determines only where
    the search starts. The other arguments save calls of `need`: `fixed_bytes` does not depend on the size, and
    `requested_bytes` is the approximate number of bytes for the requested size.
    """
    measured: dict[int, int] = {}
    # Invariant: `fits` steps fit (0: nothing measured yet) and `too_large` steps do not.
    max_steps = largest_side // _STEP
    fits, too_large = 0, max_steps + 1
    step, expected = min(max(1, max(requested) // _STEP), max_steps), None
    if requested_bytes is not None:
        known = {max(requested) / _STEP: requested_bytes}
        step, _ = _guess(known, fixed_bytes, capacity_bytes, range(1, max_steps + 1))
    while too_large - fits > 1:
        size_bytes = need(_scale(requested, step))
        if size_bytes is not None and size_bytes <= capacity_bytes:
            fits = step
        else:
            too_large = step
        bad_guess = size_bytes is None or (
            expected is not None and abs(size_bytes - expected) > size_bytes * _GUESS_TOLERANCE
        )
        if size_bytes is not None:
            measured[step] = size_bytes
        step, expected = (fits + too_large) // 2, None
        if not bad_guess and too_large - fits > 1:
            step, expected = _guess(measured, fixed_bytes, capacity_bytes, range(fits + 1, too_large))
    return _scale(requested, fits) if fits else None


def _scale(size: Size, steps: int) -> Size:
    """Return a size with about the same aspect ratio and a longer side of `steps` × 128 pixels."""
    width, height = (max(1, round(side * steps / max(size))) * _STEP for side in size)
    return width, height


def _guess(measured: Mapping[Any, int], fixed_bytes: int, capacity_bytes: int, candidates: range) -> tuple[int, float]:
    """Return the largest candidate that is expected to fit, and its expected memory use in bytes.

    If no candidate is expected to fit, return the smallest one.
    """
    # Near one size, memory is about linear in the pixels.
    nearest = sorted(measured.items(), key=lambda item: abs(item[1] - capacity_bytes))
    (step, step_bytes), (other, other_bytes) = [*nearest, (0, fixed_bytes)][:2]
    slope = (step_bytes - other_bytes) / (step**2 - other**2)
    expected = {candidate: step_bytes + slope * (candidate**2 - step**2) for candidate in candidates}
    best = max(
        (candidate for candidate in candidates if expected[candidate] <= capacity_bytes), default=candidates.start
    )
    return best, expected[best]
