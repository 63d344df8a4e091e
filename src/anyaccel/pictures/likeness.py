"""How like two pictures are."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["measure_psnr"]


def measure_psnr(seen: Any, expected: Any, reach: float = 1.0) -> float | None:
    """In decibels, of arrays of numbers that reach from 0 to `reach`; None where they are the same."""
    error = float(((seen.astype("float64") - expected.astype("float64")) ** 2).mean())
    return 10 * math.log10(reach**2 / error) if error > 0 else None
