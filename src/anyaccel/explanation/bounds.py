"""What can be asked about: how many images, and how large; checked before anything is imported or built."""

from __future__ import annotations

from anyaccel.errors import UsageError

__all__ = ["check_batch", "check_sides"]

_MOST_IMAGES = 1024
_LONGEST_SIDE = 16384


def check_batch(batch: int, hint: str = "batch=1") -> None:
    """Raise if a batch is no number of images."""
    if isinstance(batch, bool) or not isinstance(batch, int) or not 1 <= batch <= _MOST_IMAGES:
        raise UsageError(f"a batch is a number of images from 1 to {_MOST_IMAGES}, not {batch!r}", hint=hint)


def check_sides(width: int | None, height: int | None) -> None:
    """Raise if a side is no number of pixels, or longer than any model makes one."""
    for name, side in (("width", width), ("height", height)):
        if side is None:
            continue
        if isinstance(side, bool) or not isinstance(side, int) or side < 1:
            raise UsageError(f"{name} is a whole number of pixels, not {side!r}", hint=f"for example {name}=1024")
        if side > _LONGEST_SIDE:
            hint = "no model makes larger pictures; enlarge one"
            raise UsageError(f"{name} is at most {_LONGEST_SIDE} pixels, not {side}", hint=hint)
