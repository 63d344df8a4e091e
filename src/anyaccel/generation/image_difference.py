"""How like two pictures are."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["measure_difference", "measure_psnr"]


def measure_psnr(seen: Any, expected: Any, reach: float = 1.0) -> float | None:
    """In decibels, of arrays of numbers that reach from 0 to `reach`; None where they are the same."""
    error = float(((seen.astype("float64") - expected.astype("float64")) ** 2).mean())
    return 10 * math.log10(reach**2 / error) if error > 0 else None


def measure_difference(seen: Any, expected: Any) -> float | None:
    """Return the largest difference of two arrays, divided by the largest number expected if that is above 1.

    Images reach from 0 to 1; embeddings of a prior may reach 45,000, where rounding alone is 0.5. None if the shapes
    differ.
    """
    if seen.shape != expected.shape:
        return None
    return float(abs(seen - expected).max()) / max(1.0, float(abs(expected).max()))
