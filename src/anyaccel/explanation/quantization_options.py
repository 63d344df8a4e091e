"""Quantization options that would save memory.

They change the image, so they are never selected by default.
"""

from __future__ import annotations

from anyaccel.backends.sheet import Sheet
from anyaccel.planning.facts import PipelineFacts
from anyaccel.planning.memory import Forecast, QuantizationOption

__all__ = ["list_quantization_options"]


def list_quantization_options(
    sheet: Sheet, facts: PipelineFacts, forecast: Forecast, dtype: str
) -> tuple[QuantizationOption, ...]:
    """Return the quantization formats on the sheet, with the memory each would save for the largest model."""
    weights = dict(forecast.components)
    largest = max(facts.components, key=lambda component: weights.get(component.name, 0), default=None)
    if largest is None:
        return ()
    # The other usual dtypes, float16 and bfloat16, have 16 bits.
    bits = {"float32": 32}.get(dtype, 16)
    saved = {form.name: int(weights[largest.name] * (1 - form.bits / bits)) for form in sheet.quantized_weights}
    return tuple(
        QuantizationOption(form.name, largest.name, saved[form.name], form.says) for form in sheet.quantized_weights
    )
