"""The largest picture that fits: guessed from what other sizes need, and then measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping

__all__ = ["find_largest_size"]

Size = tuple[int, int]
_STEP = 128
_MOST_STEPS = 4096 // _STEP
"""No larger picture is tried: few models make one."""
_OFF = 0.1
"""A guess whose need was foreseen no better than by this share is followed by the middle of what is left."""


def find_largest_size(need: Callable[[Size], int | None], asked: Size, capacity_bytes: int) -> Size | None:
    """The largest size of the asked one's shape, in steps of 128 pixels, that fits; None where none does.

    `need` gives the bytes that a size takes, and None for one that the model does not make. Which size was asked about
    decides where the search begins, and not how it ends.
    """
    known: dict[int, int] = {}
    fits, too_large = 0, _MOST_STEPS + 1
    step, expected = min(max(1, max(asked) // _STEP), _MOST_STEPS), None
    while too_large - fits > 1:
        found = need(_scale(asked, step))
        fits, too_large = (step, too_large) if found is not None and found <= capacity_bytes else (fits, step)
        off = found is None or (expected is not None and abs(found - expected) > found * _OFF)
        if found is not None:
            known[step] = found
        step, expected = (fits + too_large) // 2, None
        if not off and too_large - fits > 1:
            step, expected = _guess(known, capacity_bytes, range(fits + 1, too_large))
    return _scale(asked, fits) if fits else None


def _scale(size: Size, steps: int) -> Size:
    """The size of the same shape whose longer side has so many steps."""
    width, height = (max(1, round(side * steps / max(size))) * _STEP for side in size)
    return width, height


def _guess(known: Mapping[int, int], capacity_bytes: int, left: range) -> tuple[int, float]:
    """The largest of what is left that seems to fit, or the smallest, and what it seems to need.

    Near one size what is held grows with the pixels: a line through the two sizes that need most nearly what there is.
    """
    nearest = sorted(known.items(), key=lambda one: abs(one[1] - capacity_bytes))
    (step, held), (other, held_there) = [*nearest, (0, 0)][:2]
    a_pixel = (held - held_there) / (step**2 - other**2)
    expected = {one: held + a_pixel * (one**2 - step**2) for one in left}
    best = max((one for one in left if expected[one] <= capacity_bytes), default=left.start)
    return best, expected[best]
