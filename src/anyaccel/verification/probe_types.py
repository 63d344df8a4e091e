"""Asking a device about a number type: whether it is kept, whether its arithmetic is right, and how fast it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from anyaccel.backends.claim import Claim, DtypeLimit, Limit, Unknown
from anyaccel.backends.dtype_probe import probe_dtype
from anyaccel.backends.out_of_memory import is_out_of_memory
from anyaccel.verification.context import Observation, ProbeContext, describe_error, fill

if TYPE_CHECKING:
    import torch

__all__ = ["probe_type"]

_TOLERANCES = {"float64": 1e-10, "float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}
"""By type, for products and softmaxes whose results are near 1."""
_SLOW_SHARE = 1.2
"""A type that takes so many times as long as the one to take instead is slow."""
_RUNS = 100
_PATIENCE_S = 0.5
"""After this no further run is begun."""


def probe_type(bench: ProbeContext, name: str, claim: Claim | Unknown) -> Observation:
    """Numbers of a type stored, added, multiplied and, where the sheet calls it slow, timed."""
    dtype = name.removeprefix("dtypes.")
    if dtype.startswith("float8"):
        return _probe_float8(bench, dtype, claim)
    effect = probe_dtype(dtype, bench.device)
    if effect is not None:
        return Observation(effect, "two numbers, added and read back")
    if dtype in _TOLERANCES:
        sight = _compare_products(bench, dtype)
        if sight.seen != "yes":
            return sight
    else:
        sight = Observation("yes", "two numbers, added and read back")
    if isinstance(claim, DtypeLimit) and claim.effect == "slow" and not bench.virtual:
        return _time_type(bench, dtype, claim.becomes or "float32")
    return sight


def _compare_products(bench: ProbeContext, dtype: str) -> Observation:
    """A matrix product and a softmax, against the host in float64 from the same rounded numbers."""
    import torch

    left, right = (fill((48, 48), seed).to(getattr(torch, dtype)) for seed in (1, 2))
    exact, there = (left.double() @ right.double()) / 7, (left.to(bench.device) @ right.to(bench.device)) / 7
    spread = torch.softmax(left.double(), -1), torch.softmax(left.to(bench.device), -1)
    difference = max(float((a - b.cpu().double()).abs().max()) for a, b in ((exact, there), spread))
    right_enough = difference <= _TOLERANCES[dtype]
    detail = f"a product and a softmax differ from the host's by {difference:.1e}, {_TOLERANCES[dtype]:.0e} allowed"
    return Observation("yes" if right_enough else "wrong", detail)


def _probe_float8(bench: ProbeContext, dtype: str, claim: Claim | Unknown) -> Observation:
    """Stored and cast, in a scaled product, and added.

    A sheet that takes the type speaks of storage and products; one that refuses it, of any of the three.
    """
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    numbers = fill((32, 32)).to(kind)
    try:
        stored = torch.equal(numbers.to(bench.device).float().cpu(), numbers.float())
    except Exception as error:  # an error of the device is a finding
        if is_out_of_memory(error):
            raise
        return Observation("error", f"cannot be stored: {describe_error(error)}")
    product, addition = _try(lambda: _multiply_float8(bench.device, numbers)), _try(lambda: _add(bench.device, numbers))
    detail = f"stored: {'right' if stored else 'wrong'}; scaled product: {product}; addition: {addition}"
    refused = product != "right" or (isinstance(claim, Limit) and addition != "right")
    return Observation("wrong" if not stored else "error" if refused else "yes", detail)


def _multiply_float8(device: torch.device, numbers: torch.Tensor) -> bool:
    import torch

    from anyaccel.upstream.torch_internals import scaled_mm

    # The other side is e4m3fn for both: NVIDIA has no product of e5m2 with e5m2.
    other = fill((32, 32), 1).to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)
    there = scaled_mm(numbers.to(device), other.to(device).t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    return bool(torch.allclose(there.cpu().float(), numbers.float() @ other.float().t(), rtol=0.05, atol=0.1))


def _add(device: torch.device, numbers: torch.Tensor) -> bool:
    there = numbers.to(device)
    return bool(((there + there).float().cpu() - 2 * numbers.float()).abs().max() <= numbers.float().abs().max())


def _try(run: Callable[[], bool]) -> str:
    try:
        return "right" if run() else "wrong"
    except Exception as error:  # an error of the device is a finding
        if is_out_of_memory(error):
            raise
        return describe_error(error)


def _time_type(bench: ProbeContext, dtype: str, instead: str) -> Observation:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that wait for one another on a busy host spoil the figure
    share = _time(bench, dtype) / _time(bench, instead)
    torch.set_num_threads(threads)
    figure = f"some {float(f'{share:.1g}'):.0f}" if share >= 10 else f"{share:.1f}"
    detail = f"a product and a convolution take {figure} times as long as in {instead}"
    return Observation("slow" if share > _SLOW_SHARE else "yes", detail)


def _time(bench: ProbeContext, dtype: str) -> float:
    """Seconds for a matrix product and, in a floating type, a convolution, in the best of some runs."""
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    matrix = fill((256, 256)).to(kind).to(bench.device)
    image, kernel = (fill(shape).to(kind).to(bench.device) for shape in ((1, 32, 32, 32), (32, 32, 3, 3)))
    times: list[float] = []
    while len(times) < _RUNS and sum(times) < _PATIENCE_S:
        start = time.perf_counter()
        matrix @ matrix
        if kind.is_floating_point:
            torch.nn.functional.conv2d(image, kernel)
        bench.driver.synchronize(bench.index)
        times.append(time.perf_counter() - start)
    return min(times)
