"""Prediction of the host memory that loading a pipeline needs, from the sizes of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["LoadingForecast", "WeightBytes", "predict_loading"]


@dataclass(frozen=True)
class WeightBytes:
    """The sizes of a component's weights, in its files and after loading."""

    mapped: int
    """Weights that keep their dtype. They are memory-mapped from the files, without a copy."""
    cast: int
    """Weights that are cast while they are loaded, in their new dtype."""

    @property
    def total(self) -> int:
        """Bytes of all weights after loading."""
        return self.mapped + self.cast


@dataclass(frozen=True)
class LoadingForecast:
    """The host memory for loading a pipeline."""

    peak_bytes: int
    """Weights that are in host memory at the same time, each counted once."""
    allocated_bytes: int
    """The highest amount that is allocated. The rest is mapped from the files, so the operating system can drop it."""
    component: str | None = None
    """The component at the peak, if each one leaves the host before the next one is loaded."""


def predict_loading(weights: Mapping[str, WeightBytes], *, one_at_a_time: bool) -> LoadingForecast:
    """Return the host memory for loading these components.

    With `one_at_a_time`, each component is moved to the device before the next one is loaded.
    """
    if not one_at_a_time or not weights:
        return LoadingForecast(
            sum(size.total for size in weights.values()), sum(size.cast for size in weights.values())
        )
    largest = max(weights, key=lambda name: weights[name].total)
    return LoadingForecast(weights[largest].total, max(size.cast for size in weights.values()), largest)
