"""Estimate of the time of a pipeline call, from its floating-point operations and a device's published throughput.

Known limitations: the time of memory accesses, of kernel launches and of weights that are moved during the call is not
modeled. Small models and small images are slower than estimated.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from anyaccel.backends.sheet import Product
from anyaccel.planning.footprint import Footprint

__all__ = ["LARGEST_RATIO", "SMALLEST_RATIO", "UTILIZATION", "TimeEstimate", "count_flops", "estimate_time"]

# Share of the published throughput that eager models reach on an H200, and the smallest and the largest ratio of the
# measured to the estimated time, each estimated from the other models: benchmarks/results/time_estimate_cuda.json.
UTILIZATION = 0.324
SMALLEST_RATIO, LARGEST_RATIO = 0.624, 4.768
_HALF_PRECISION = ("float16", "bfloat16")
# Denoising steps in a footprint.
_TRACED_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class TimeEstimate:
    """Estimated time of one pipeline call on a product."""

    seconds: float
    steps: int
    """Denoising steps."""
    flops: float
    """Floating-point operations of the call."""
    product_flops: float
    """Published floating-point operations per second of the product."""

    def to_dict(self) -> dict[str, float]:
        """Return the estimate as a JSON-compatible dict, with the range of the measured times on an H200."""
        return {**asdict(self), "least_s": self.seconds * SMALLEST_RATIO, "most_s": self.seconds * LARGEST_RATIO}


def count_flops(footprint: Footprint, steps: int, *, encoders: bool = True) -> float:
    """Return the floating-point operations of a call with this number of denoising steps."""
    total = 0.0
    for call in footprint.model_calls:
        if call.phase == "denoise":
            total += call.flops * steps / _TRACED_STEPS
        elif encoders or call.phase == "decode":
            total += call.flops
    return total


def estimate_time(footprint: Footprint, steps: int, product: Product | None, dtype: str) -> TimeEstimate | None:
    """Return the estimated time of a call whose weights stay on the device, without compilation.

    Return None if the product or its throughput is unknown, or if the models do not run in half precision.
    """
    if product is None or product.half_precision_flops is None or dtype not in _HALF_PRECISION:
        return None
    flops = count_flops(footprint, steps)
    seconds = flops / (product.half_precision_flops * UTILIZATION)
    return TimeEstimate(seconds=seconds, steps=steps, flops=flops, product_flops=product.half_precision_flops)
