"""Speed levels: what `speed="fast"` and `speed="draft"` do, and how they affect the image.

See docs/decisions/0008-speed-levels.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from anyaccel.backends.sheet import Sheet
from anyaccel.planning.decision import Decision, cite
from anyaccel.planning.options import PlacementOptions

__all__ = ["SMALLEST_WEIGHT", "StepSkipping", "choose_quantization", "choose_step_skipping"]

QUALITY = "benchmarks/results/quality_cpu.json"
# On one H200, 1280 x 1280 is slower in float8 (19 µs instead of 17), 1280 x 10240 is faster (50 instead of 84).
# The number of elements from which a weight matrix is faster in float8. Below, casting costs more than it saves.
SMALLEST_WEIGHT = 3_000_000


@dataclass(frozen=True)
class StepSkipping:
    """A rule that determines which denoising steps reuse the denoiser's last output."""

    every: int
    """One of this many steps runs the denoiser."""
    initial_share: float
    """The share of initial steps that always run: they decide the composition of the image."""
    min_steps: int
    """With fewer steps than this, every step runs."""
    cost: str
    """The measured loss of quality."""

    def is_run(self, step: int, steps: int) -> bool:
        """Return whether a step (counted from zero) runs the denoiser; the last step always does."""
        # A scheduler may take more steps than it announced, so any step from the last one on runs.
        if steps < self.min_steps or step >= steps - 1:
            return True
        first_skipped = max(self.every - 1, math.ceil(steps * self.initial_share)) if self.initial_share else 1
        return step < first_skipped or (step - first_skipped) % self.every == self.every - 1

    def count(self, steps: int) -> int:
        """Return how many of `steps` denoising steps run the denoiser."""
        return sum(self.is_run(step, steps) for step in range(steps))

    def __str__(self) -> str:
        initial = f" after the first {self.initial_share:.0%}" if self.initial_share else ""
        return f"run 1 of every {self.every} steps{initial}, if there are at least {self.min_steps} steps"


_LEVELS = {
    "fast": StepSkipping(
        2,
        0.25,
        4,
        "40 dB PSNR relative to speed='exact' at 8 steps and 32 dB at 4; an automatic check recognizes the object in "
        "every image",
    ),
    "draft": StepSkipping(
        3,
        0.0,
        4,
        "32 dB PSNR relative to speed='exact' at 8 steps; an automatic check recognizes the object in every image",
    ),
}


def choose_step_skipping(options: PlacementOptions) -> Decision[StepSkipping | None]:
    """Return the rule for reusing denoiser outputs, or None if every step runs the denoiser."""
    skipping = _LEVELS.get(options.speed)
    if skipping is None:
        return Decision(None, "speed='exact': every step runs the denoiser")
    return Decision(skipping, f"speed={options.speed!r}: on the embedded model, {skipping.cost} ({QUALITY})")


def choose_quantization(sheet: Sheet, options: PlacementOptions, dtype: str) -> Decision[str]:
    """Return `float8` for quantized matrix products, or an empty string to keep the model's dtype.

    float8 is used only at the `fast` and `draft` speed levels, for half-precision models, on devices
    where it is known to be faster.
    """
    if options.speed == "exact":
        return Decision("", "speed='exact': matrix products use the dtype of the model")
    if options.weights is not None:
        return Decision("", f"the weights are quantized with weights={options.weights!r} instead")
    # Only if the sheet has a measurement: on other devices casting to float8 may cost more than it saves.
    speedup = sheet.speedup("float8")
    if speedup is None:
        return Decision("", "float8 is not known to be faster on this device")
    if dtype not in ("bfloat16", "float16"):
        return Decision("", f"float8 requires a half-precision model, but this one runs in {dtype}")
    return Decision("float8", f"speed={options.speed!r}: {cite(speedup)}")
