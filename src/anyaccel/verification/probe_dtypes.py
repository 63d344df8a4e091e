"""Probe that checks a dtype's storage, correctness and speed on a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from anyaccel.backends.claim import Claim, DtypeLimit, Limit, Unknown
from anyaccel.backends.dtype_probe import probe_dtype
from anyaccel.backends.out_of_memory import is_out_of_memory
from anyaccel.verification.context import Observation, ProbeContext, describe_error, seeded_randn

if TYPE_CHECKING:
    import torch

__all__ = ["probe_dtype_claim"]

# Absolute tolerance by dtype, for matrix products and softmaxes with results near 1.
_TOLERANCES = {"float64": 1e-10, "float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}
# Ratio to the time of the replacement dtype from which a dtype counts as slow.
_SLOW_RATIO = 1.2
# Maximum number of runs, and the time after which no further run starts.
_RUNS = 100
_MAX_SECONDS = 0.5


def probe_dtype_claim(context: ProbeContext, name: str, claim: Claim | Unknown) -> Observation:
    """Check that a dtype can be stored and that additions and matrix products are correct.

    If the sheet lists the dtype as slow, its speed is measured too.
    """
    dtype = name.removeprefix("dtypes.")
    if dtype.startswith("float8"):
        return _probe_float8(context, dtype, claim)
    effect = probe_dtype(dtype, context.device)
    if effect is not None:
        return Observation(effect, "added two values and read them back")
    if dtype in _TOLERANCES:
        observation = _compare_products(context, dtype)
        if observation.seen != "yes":
            return observation
    else:
        observation = Observation("yes", "added two values and read them back")
    if isinstance(claim, DtypeLimit) and claim.effect == "slow" and not context.virtual:
        return _time_dtype(context, dtype, claim.becomes or "float32")
    return observation


def _compare_products(context: ProbeContext, dtype: str) -> Observation:
    """Compare a matrix product and a softmax on the device with float64 results from the CPU.

    Both devices use the same inputs, which are rounded to `dtype`.
    """
    import torch

    left, right = (seeded_randn((48, 48), seed).to(getattr(torch, dtype)) for seed in (1, 2))
    # A sum of 48 products of normal values has a standard deviation of about 7.
    products = (left.double() @ right.double()) / 7, (left.to(context.device) @ right.to(context.device)) / 7
    softmaxes = torch.softmax(left.double(), -1), torch.softmax(left.to(context.device), -1)
    difference = max(float((a - b.cpu().double()).abs().max()) for a, b in (products, softmaxes))
    tolerance = _TOLERANCES[dtype]
    detail = f"a product and a softmax differ from the CPU's by {difference:.1e}, {tolerance:.0e} allowed"
    return Observation("yes" if difference <= tolerance else "wrong", detail)


def _probe_float8(context: ProbeContext, dtype_name: str, claim: Claim | Unknown) -> Observation:
    """Store and cast float8 values, and use them in a scaled matrix product and in an addition."""
    import torch

    dtype: torch.dtype = getattr(torch, dtype_name)
    values = seeded_randn((32, 32)).to(dtype)
    try:
        stored = torch.equal(values.to(context.device).float().cpu(), values.float())
    except Exception as error:  # an error of the device is a result
        if is_out_of_memory(error):
            raise
        return Observation("error", f"cannot be stored: {describe_error(error)}")
    product = _try(lambda: _multiply_float8(context.device, values))
    addition = _try(lambda: _add(context.device, values))
    detail = f"stored: {'right' if stored else 'wrong'}; scaled product: {product}; addition: {addition}"
    # A sheet with float8 claims storage and products only. A limit is confirmed by a failure of any of the three.
    fails = product != "right" or (isinstance(claim, Limit) and addition != "right")
    return Observation("wrong" if not stored else "error" if fails else "yes", detail)


def _multiply_float8(device: torch.device, values: torch.Tensor) -> bool:
    import torch

    from anyaccel.upstream.torch_internals import scaled_mm

    # cuBLAS does not multiply e5m2 with e5m2: https://github.com/pytorch/pytorch/issues/132005
    other = seeded_randn((32, 32), 1).to(torch.float8_e4m3fn)
    scale = torch.ones((), device=device)
    actual = scaled_mm(values.to(device), other.to(device).t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)
    return bool(torch.allclose(actual.cpu().float(), values.float() @ other.float().t(), rtol=0.05, atol=0.1))


def _add(device: torch.device, values: torch.Tensor) -> bool:
    on_device = values.to(device)
    difference = (on_device + on_device).float().cpu() - 2 * values.float()
    return bool(difference.abs().max() <= values.float().abs().max())


def _try(run: Callable[[], bool]) -> str:
    try:
        return "right" if run() else "wrong"
    except Exception as error:  # an error of the device is a result
        if is_out_of_memory(error):
            raise
        return describe_error(error)


def _time_dtype(context: ProbeContext, dtype: str, replacement: str) -> Observation:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that wait for each other on a busy CPU distort the times
    ratio = _time(context, dtype) / _time(context, replacement)
    torch.set_num_threads(threads)
    # Large ratios vary between runs, so they are rounded to one digit.
    figure = f"about {float(f'{ratio:.1g}'):.0f}" if ratio >= 10 else f"{ratio:.1f}"
    detail = f"a product and a convolution take {figure} times as long as in {replacement}"
    return Observation("slow" if ratio > _SLOW_RATIO else "yes", detail)


def _time(context: ProbeContext, dtype_name: str) -> float:
    """Return the shortest measured time in seconds for a matrix product and a convolution.

    Integer dtypes are measured without the convolution.
    """
    import torch

    dtype: torch.dtype = getattr(torch, dtype_name)
    matrix = seeded_randn((256, 256)).to(dtype).to(context.device)
    image, kernel = (seeded_randn(shape).to(dtype).to(context.device) for shape in ((1, 32, 32, 32), (32, 32, 3, 3)))
    times: list[float] = []
    while len(times) < _RUNS and sum(times) < _MAX_SECONDS:
        start = time.perf_counter()
        matrix @ matrix
        if dtype.is_floating_point:
            torch.nn.functional.conv2d(image, kernel)
        context.driver.synchronize(context.index)
        times.append(time.perf_counter() - start)
    return min(times)
