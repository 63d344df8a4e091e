"""The memory that a model would need with each format of the option `weights=`.

Quantization changes the image, so it is never selected by default.
"""

from __future__ import annotations

from collections.abc import Callable

from anyaccel.errors import MissingLibraryError
from anyaccel.planning.decision import Decision
from anyaccel.planning.memory import Forecast, MemoryRule, QuantizationOption
from anyaccel.planning.options import WEIGHT_FORMATS, PlacementOptions
from anyaccel.planning.plan import Plan

__all__ = ["is_quantization_useful", "list_quantization_options"]


def is_quantization_useful(plan: Plan, options: PlacementOptions) -> bool:
    """Return whether a call does not fit, or only with weights that leave the device during the call."""
    if options.weights is not None or options.parallel is not None or plan.forecast is None:
        return False
    # A memory mode that was requested is not changed.
    return not plan.forecast.fits or (options.memory is None and plan.memory.value.residence != "resident")


def list_quantization_options(
    forecast: Callable[[str], tuple[Decision[MemoryRule | None], Forecast]],
) -> tuple[tuple[QuantizationOption, ...], tuple[str, ...]]:
    """Return the memory that each format needs, where `forecast(weights)` returns the forecast for a format.

    The second value are notes on formats that require a package that is not installed.
    """
    options, notes = [], []
    for weights in WEIGHT_FORMATS:
        try:
            decision, predicted = forecast(weights)
        except MissingLibraryError as error:
            notes.append(f"{error.message}, so its memory is not predicted ({error.hint})")
            continue
        option = QuantizationOption(
            name=weights,
            weights_bytes=sum(size for _, size in predicted.components),
            peak_bytes=predicted.peak_bytes,
            memory=str(decision) if predicted.fits else "does not fit",
            fits=predicted.fits,
        )
        options.append(option)
    return tuple(options), tuple(notes)
