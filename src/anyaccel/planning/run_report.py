"""What happened to a placed pipeline: the counterpart of the plan, which is never edited."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from anyaccel.planning.decision import Decision
from anyaccel.planning.memory import Forecast, MemoryRule

__all__ = ["RunReport"]


@dataclass
class RunReport:
    """The outcome of what a plan decided, so far; None where nothing happened yet."""

    memory: Decision[MemoryRule] | None = None
    """How the last call used memory, where it was not as planned for the weights."""
    float32_models: Decision[tuple[str, ...]] | None = None
    """Models that produced NaN or Inf and run in float32 since."""
    compiled_models: Decision[tuple[str, ...]] | None = None
    """Models that run compiled code."""
    compiled_sizes: Decision[tuple[str, ...]] | None = None
    """Sizes that were run since models were compiled."""
    not_compiled: Decision[tuple[str, ...]] | None = None
    """Models that could not be compiled, or stopped running compiled code; they run eagerly."""
    capture: Decision[bool] | None = None
    """Whether device graphs are replayed, and why not."""
    quantization: Decision[str] | None = None
    step_skipping: Decision[str] | None = None
    """How many denoiser outputs of the last call were reused."""
    forecast: Forecast | None = None
    """The memory that the last call was expected to need, where it was computed."""

    def entries(self) -> Iterator[tuple[str, Decision[Any]]]:
        """Yield what happened, by name."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Decision):
                yield field.name, value

    def add_not_compiled(self, model: str, reason: str) -> None:
        """Note that a model runs eagerly from now on, and why."""
        before = self.not_compiled or Decision((), "")
        if model in before.value:
            return
        reasons = "; ".join(text for text in (before.reason, f"{model}: {reason}") if text)
        self.not_compiled = Decision((*before.value, model), reasons)
        if self.compiled_models is not None:
            names = tuple(name for name in self.compiled_models.value if name != model)
            self.compiled_models = Decision(names, self.compiled_models.reason)
