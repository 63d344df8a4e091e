"""The largest picture that fits: guessed from what smaller ones need, and then measured."""

from __future__ import annotations

import math
from collections.abc import Callable

__all__ = ["find_largest_size"]

Size = tuple[int, int]
_STEP = 64
_MOST_SIDE = 4096
"""No larger picture is tried: few models make one."""
_TRIES = 4


def find_largest_size(
    need: Callable[[Size], int], asked: Size, capacity_bytes: int, weights_bytes: int = 0
) -> Size | None:
    """The largest size of the asked one's shape that fits; None where none does.

    What is held beside the weights grows as some power of the side. Each try learns the power from the last two.
    """
    most = _MOST_SIDE / max(asked)
    tried = {1.0: need(asked)}
    power = 2.0
    best = 1.0 if tried[1.0] <= capacity_bytes else 0.0
    for _ in range(_TRIES):
        share, held = min(tried.items(), key=lambda one: abs(one[1] - capacity_bytes))
        room = max(1, capacity_bytes - weights_bytes) / max(1, held - weights_bytes)
        guess = _settle(asked, min(most, share * math.exp(math.log(room) / power)))
        if guess in tried or guess <= best:
            break
        tried[guess] = need(_scale(asked, guess))
        best = guess if tried[guess] <= capacity_bytes else best
        if best == _settle(asked, most):
            break
        grown = max(2, tried[guess] - weights_bytes) / max(1, held - weights_bytes)
        power = max(1.0, math.log(grown) / math.log(guess / share)) if guess != share else power
    return _scale(asked, best) if best else None


def _scale(size: Size, share: float) -> Size:
    width, height = (max(_STEP, round(side * share / _STEP) * _STEP) for side in size)
    return width, height


def _settle(size: Size, share: float) -> float:
    """The share of a whole number of steps, not above."""
    longest = max(size)
    return max(_STEP, int(longest * share) // _STEP * _STEP) / longest
