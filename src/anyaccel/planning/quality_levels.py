"""One word for more speed: what `speed="fast"` and `speed="draft"` give up of the picture's exactness."""

from __future__ import annotations

import math
from dataclasses import dataclass

from anyaccel.backends.sheet import Sheet
from anyaccel.planning.decision import Decision
from anyaccel.planning.options import PlacementOptions

__all__ = ["SMALLEST_WEIGHT", "StepSkipping", "choose_quantization", "choose_step_skipping"]

QUALITY = "benchmarks/results/quality_cpu.json"
SMALLEST_WEIGHT = 3_000_000
"""Numbers of a matrix from which on its products are faster in 8 bits; with fewer, casts cost more than that gains."""


@dataclass(frozen=True)
class StepSkipping:
    """At which steps a denoiser's last answer is taken again."""

    every: int
    """One step of so many is run."""
    at_first: float
    """The share of the first steps that are all run: what the picture shows is decided there."""
    fewest: int
    """With fewer steps than this, each is run."""
    cost: str
    """What it costs in quality, where that was measured."""

    def is_run(self, step: int, steps: int) -> bool:
        """Whether a step, counted from 0, is run; the last one always is."""
        if steps < self.fewest or step >= steps - 1:
            return True
        begin = max(self.every - 1, math.ceil(steps * self.at_first)) if self.at_first else 1
        return step < begin or (step - begin) % self.every == self.every - 1

    def count(self, steps: int) -> int:
        """How many steps are run."""
        return sum(self.is_run(step, steps) for step in range(steps))

    def __str__(self) -> str:
        first = f"after the first {self.at_first:.0%} " if self.at_first else ""
        return f"one step of {self.every} {first}is run, from {self.fewest} steps on"


_REUSES = {
    "fast": StepSkipping(
        2, 0.25, 4, "40 dB from exact at 8 steps and 32 dB at 4, and the judge sees in all of them what was asked for"
    ),
    "draft": StepSkipping(
        3, 0.0, 4, "32 dB from exact at 8 steps, and the judge sees in all of them what was asked for"
    ),
}


def choose_step_skipping(options: PlacementOptions) -> Decision[StepSkipping | None]:
    """At which steps the denoiser's last answer is taken again, instead of running it."""
    found = _REUSES.get(options.speed)
    if found is None:
        return Decision(None, "speed='exact': every step is run")
    return Decision(found, f"speed={options.speed!r}: the embedded model's pictures are {found.cost} ({QUALITY})")


def choose_quantization(sheet: Sheet, options: PlacementOptions, dtype: str) -> Decision[str]:
    """The type that products of large matrices are done in; empty for the model's own."""
    if options.speed == "exact":
        return Decision("", "speed='exact': products are done in the model's own type")
    speedup = sheet.speedup("float8")
    if speedup is None:
        return Decision("", "that products in 8 bits pay here is not known")
    if dtype not in ("bfloat16", "float16"):
        return Decision("", f"it is for half precision, and models run in {dtype}")
    return Decision("float8", f"speed={options.speed!r}: {speedup.says} ({speedup.source})")
