"""The option `weights=`: which models are quantized when a pipeline is placed, and the error that this causes."""

from __future__ import annotations

import math
from typing import TypeAlias

from anyaccel.errors import UsageError
from anyaccel.planning.decision import Decision
from anyaccel.planning.facts import ComponentFacts, PipelineFacts, WeightError
from anyaccel.planning.options import PlacementOptions

__all__ = ["check_not_quantized_otherwise", "choose_weights", "find_weights_to_quantize"]

# Smaller encoders, such as CLIP in FLUX and Stable Diffusion XL, would save little memory.
_SMALLEST_SHARE = 0.1
# Its answer is a threshold, and no image depends on its precision otherwise.
_KEPT = ("safety_checker",)
_Formats: TypeAlias = tuple[tuple[str, str], ...]


def find_weights_to_quantize(facts: PipelineFacts) -> tuple[str, ...]:
    """Return the names of the models that `weights=` quantizes: the denoisers and the large text and image encoders."""
    total = sum(component.parameters for component in facts.components)
    return tuple(
        component.name
        for component in facts.components
        if component.denoises
        or (component.has_own_dtype and component.name not in _KEPT and component.parameters >= _SMALLEST_SHARE * total)
    )


def check_not_quantized_otherwise(component: ComponentFacts, weights: str) -> None:
    """Raise `UsageError` if a model cannot be quantized, because its weights already have another format."""
    before = component.weight_error.format if component.weight_error else ""
    others = tuple(name for name in component.weight_libraries if not before)
    if before in ("", weights) and not others and not component.quantized:
        return
    found = before or " and ".join(others) or "quantized"
    raise UsageError(
        f"weights={weights!r} is not possible: {component.name} already has {found} weights",
        hint="load the pipeline again without quantization"
        if before
        else f"omit weights=, or load {component.name} without quantization",
    )


def choose_weights(facts: PipelineFacts, options: PlacementOptions) -> Decision[_Formats]:
    """Return the models that anyaccel has quantized, each with its format; the reason has the measured errors."""
    errors = {component.name: component.weight_error for component in facts.components if component.weight_error}
    if not errors:
        why = "no weights= was requested" if options.weights is None else "no model has layers that can be quantized"
        return Decision((), f"{why}: the weights keep their format")
    why = "an earlier placement has quantized the weights, which is permanent"
    if options.weights is not None:
        why = f"weights={options.weights!r} was requested"
    chosen = tuple((name, error.format) for name, error in errors.items())
    if all(math.isnan(error.mean) for error in errors.values()):
        return Decision(chosen, f"{why}; the error is not measured, because the weights are not loaded")
    return Decision(chosen, f"{why}; relative error of the weights: {'; '.join(map(_describe_error, errors.items()))}")


def _describe_error(measured: tuple[str, WeightError]) -> str:
    name, error = measured
    return f"{name} {_percent(error.mean)}, worst layer {error.worst_layer} {_percent(error.worst)}"


def _percent(share: float) -> str:
    return f"{share * 100:.2g} %"
