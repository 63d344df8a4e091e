"""Run reports: what happened after a pipeline was placed, such as compilations and fallbacks.

A report is kept separate from the plan's decisions, which never change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from anyaccel.planning.decision import Decision
from anyaccel.planning.memory import Forecast, MemoryRule

__all__ = ["RunReport"]


@dataclass
class RunReport:
    """The outcomes of a plan's decisions so far; a field is None if there is no outcome yet."""

    memory: Decision[MemoryRule] | None = None
    """The memory rule of the last call, if it differs from the plan."""
    float32_models: Decision[tuple[str, ...]] | None = None
    """Models that produced NaN or Inf and were switched to float32."""
    compiled_models: Decision[tuple[str, ...]] | None = None
    """Models that run compiled code."""
    compiled_sizes: Decision[tuple[str, ...]] | None = None
    """Sizes that ran since the models were compiled."""
    not_compiled: Decision[tuple[str, ...]] | None = None
    """Models that could not be compiled, or stopped running compiled code; they run eagerly."""
    capture: Decision[bool] | None = None
    """Whether captured device graphs are replayed; if not, the reason."""
    quantization: Decision[str] | None = None
    """The dtype of quantized weights; empty if quantization failed."""
    step_skipping: Decision[str] | None = None
    """How many denoiser outputs of the last call were reused."""
    forecast: Forecast | None = None
    """The predicted memory of the last call, if it was computed."""

    def entries(self) -> Iterator[tuple[str, Decision[Any]]]:
        """Yield the name and the `Decision` object for each recorded outcome."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Decision):
                yield field.name, value

    def add_not_compiled(self, model: str, reason: str) -> None:
        """Record that a model runs eagerly instead of compiled, with the reason."""
        before = self.not_compiled or Decision((), "")
        if model in before.value:
            return
        reasons = "; ".join(text for text in (before.reason, f"{model}: {reason}") if text)
        self.not_compiled = Decision((*before.value, model), reasons)
        # A model is in only one of the two lists.
        if self.compiled_models is not None:
            names = tuple(name for name in self.compiled_models.value if name != model)
            self.compiled_models = Decision(names, self.compiled_models.reason)
