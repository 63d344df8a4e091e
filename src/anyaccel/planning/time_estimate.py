"""Estimate of the time of a pipeline call, from its operations and a device's published throughput and bandwidth.

Known limitations: weights that are moved during the call, attention that is not fused, and compilation are not modeled.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from anyaccel.backends.sheet import Product
from anyaccel.planning.footprint import Footprint, Work

__all__ = [
    "LARGEST_RATIO",
    "SECONDS_PER_KERNEL",
    "SMALLEST_RATIO",
    "UTILIZATION",
    "TimeEstimate",
    "count_moved_bytes",
    "count_work",
    "estimate_seconds",
    "estimate_time",
]

# Share of the published throughput that matrix products reach in eager mode, the time to start a kernel, and the
# smallest and the largest ratio of measured to estimated times. All four were fitted to times on an H200, and the
# ratios are those of models that were left out of the fit: benchmarks/results/time_estimate_cuda.json.
UTILIZATION = 0.92
SECONDS_PER_KERNEL = 26e-6
SMALLEST_RATIO, LARGEST_RATIO = 0.67, 1.931
_HALF_PRECISION = ("float16", "bfloat16")


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
    product_bytes_per_s: float
    """Published memory bandwidth of the product."""
    moved_bytes: int
    """Weights that are moved to the device during the call; this time is not part of the estimate."""

    def to_dict(self) -> dict[str, float]:
        """Return the estimate as a JSON-compatible dict, with the range of the measured times on an H200."""
        return {**asdict(self), "least_s": self.seconds * SMALLEST_RATIO, "most_s": self.seconds * LARGEST_RATIO}


def count_work(footprint: Footprint, steps: int, *, encoders: bool = True) -> Work:
    """Return the work of a call with this number of denoising steps."""
    total = Work()
    for call in footprint.model_calls:
        if call.phase == "denoise":
            total += call.work * footprint.count_loops(steps)
        elif encoders or call.phase == "decode":
            total += call.work
    return total


def count_moved_bytes(footprint: Footprint, steps: int, residence: str) -> int:
    """Return the size of the weights that a call with this number of steps moves to the device."""
    if residence == "resident":
        return 0
    pinned = footprint.never_offloaded + (footprint.never_streamed if residence == "layer" else ())
    total, previous = 0.0, ""
    for call in footprint.model_calls:
        # A layer is moved for each call; a model is moved once, and again if another one ran in between.
        if call.component in pinned or (residence != "layer" and call.component == previous):
            continue
        loops = footprint.count_loops(steps) if call.phase == "denoise" and residence == "layer" else 1.0
        total += footprint.model(call.component).weights_bytes * loops
        previous = call.component
    return int(total)


def estimate_seconds(work: Work, product_flops: float, product_bytes_per_s: float) -> float:
    """Return the estimated time of some work on a product."""
    computing_s = work.flops / (product_flops * UTILIZATION)
    return computing_s + work.traffic_bytes / product_bytes_per_s + work.kernels * SECONDS_PER_KERNEL


def estimate_time(
    footprint: Footprint, steps: int, product: Product | None, dtype: str, residence: str = "resident"
) -> TimeEstimate | None:
    """Return the estimated time of a call, without compilation.

    Return None if the product, its throughput or its bandwidth is unknown, or if the models do not run in half
    precision.
    """
    if product is None or dtype not in _HALF_PRECISION:
        return None
    flops, bytes_per_s = product.half_precision_flops, product.memory_bytes_per_s
    if flops is None or bytes_per_s is None:
        return None
    work = count_work(footprint, steps)
    return TimeEstimate(
        seconds=estimate_seconds(work, flops, bytes_per_s),
        steps=steps,
        flops=work.flops,
        product_flops=flops,
        product_bytes_per_s=bytes_per_s,
        moved_bytes=count_moved_bytes(footprint, steps, residence),
    )
