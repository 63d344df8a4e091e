"""Metrics for the difference between two images."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["measure_difference", "measure_psnr"]


def measure_psnr(actual: Any, expected: Any, data_range: float = 1.0) -> float | None:
    """Return the PSNR in dB of two arrays with values from 0 to `data_range`, or None if they are equal."""
    # Squared differences of float16 or uint8 arrays would overflow.
    error = float(((actual.astype("float64") - expected.astype("float64")) ** 2).mean())
    return 10 * math.log10(data_range**2 / error) if error > 0 else None


def measure_difference(actual: Any, expected: Any) -> float | None:
    """Return the maximum absolute difference of two arrays, or None if their shapes differ.

    If the largest absolute expected value exceeds 1, the difference is relative to that value.
    """
    # Images have values from 0 to 1. Embeddings of a prior can reach 45,000, where a rounding error is 0.5.
    if actual.shape != expected.shape:
        return None
    return float(abs(actual - expected).max()) / max(1.0, float(abs(expected).max()))
