"""Probes for the claims on a device sheet.

Each probe returns an `Observation`. A device error counts as an observation, and a probe that does
not fit in memory is skipped. A virtual device is probed only for limits that it emulates. Limits
that do not change a result, such as slow operations, are read from the device's ledger.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from anyaccel.backends.claim import Claim, Limit, Unknown
from anyaccel.backends.evidence_files import Finding, Verdict
from anyaccel.backends.out_of_memory import is_out_of_memory
from anyaccel.backends.sheet import Compiler, Product, Sheet
from anyaccel.verification.context import Observation, ProbeContext, describe_error, seeded_randn
from anyaccel.verification.probe_dtypes import probe_dtype_claim
from anyaccel.verification.probe_operations import probe_operations, probe_quirk, probe_size

if TYPE_CHECKING:
    import torch

__all__ = ["find_claims", "judge", "probe"]

_BATCH_TOLERANCE = 1e-3
# Absolute tolerance for short sums of values near 1, in float32.
_TOLERANCE = 1e-4
# Ratio of the time of `item()` to the CPU's from which it counts as slow.
_SLOW_READ = 3.0
# Extra time of the first run in a new shape from which the shape counts as compiled.
_SLOW_SHAPE_MS = 10.0
# Allowed relative difference of the reported memory from the product's label.
_MEMORY_TOLERANCE = 0.1
# Sections of a sheet that virtual devices enforce.
_ENFORCED = ("dtypes", "random_numbers", "data_dependent_shapes", "host_round_trip", "largest_tensor", "operations")
# Messages of TorchInductor and Triton when their toolchain is missing.
_NO_TOOLS = re.compile(r"C(\+\+)? compiler|TritonMissing|No module named|Python\.h", re.IGNORECASE)


def find_claims(sheet: Sheet) -> list[str]:
    """Return the names of the claims that have a probe, in the order of the sheet."""
    return [name for name, _ in sheet.claims() if name.split(".")[0] in _PROBES]


def probe(context: ProbeContext, name: str) -> Finding:
    """Run the probe for one claim, unless it must be skipped, and return the finding."""
    claim = dict(context.sheet.claims())[name]
    reason = _find_skip_reason(context, name, claim)
    return judge(context.sheet, name, Observation("", reason) if reason else _run_probe(context, name, claim))


def judge(sheet: Sheet, name: str, observation: Observation) -> Finding:
    """Compare an observation with the claim `name` on the sheet, and return the finding."""
    claim = dict(sheet.claims())[name]
    expected = _expect(claim)
    verdict: Verdict = "agrees" if observation.seen == expected else "contradicts"
    if isinstance(claim, Unknown):
        verdict = "new"
    return Finding(
        claim=name,
        expected=expected,
        seen=observation.seen,
        verdict=verdict if observation.seen else "not tried",
        detail=observation.detail,
    )


def _expect(claim: Claim | Unknown) -> str:
    if isinstance(claim, Unknown):
        return "not known"
    return claim.effect if isinstance(claim, Limit) else "yes"


def _find_skip_reason(context: ProbeContext, name: str, claim: Claim | Unknown) -> str:
    """Return why a claim cannot be probed on this device, or an empty string if it can."""
    if isinstance(claim, Limit) and claim.conditional:
        where = ", ".join([*claim.only_on, *claim.only_if])
        return f"it applies to {where}, and the device does not report whether it is one of them"
    if not context.virtual:
        return ""
    if isinstance(claim, Unknown):
        return "a virtual device has no information beyond its sheet"
    if name.split(".")[0] not in _ENFORCED:
        return "virtual devices do not emulate this"
    if isinstance(claim, Limit) and claim.evidence == "inferred" and claim.contradicted_by:
        return "virtual devices do not enforce a limit that is inferred and contradicted"
    return ""


def _run_probe(context: ProbeContext, name: str, claim: Claim | Unknown) -> Observation:
    """Run the probe for a claim and return its observation; a device error counts as an observation."""
    import torch

    if context.accelerator is not None:
        context.accelerator.ledger.clear()
    try:
        # `_probe_training` enables gradients again; the other probes do not need them.
        with torch.no_grad():
            observation = _PROBES[name.split(".")[0]](context, name, claim)
    except ImportError as error:
        return Observation("", f"a library is missing: {describe_error(error)}")
    except Exception as error:  # noqa: BLE001 - an error of the device is a result
        if is_out_of_memory(error):
            return Observation("", f"out of memory: {describe_error(error)}")
        observation = Observation("error", describe_error(error))
    if context.accelerator is not None and observation.seen == "yes":
        # Limits such as `slow` do not change a result; the virtual device only records them.
        effect = next((row.effect for row in context.accelerator.ledger.rows() if row.limit == name), None)
        return observation if effect is None else Observation(effect, "recorded by the virtual device")
    return observation


def _probe_random_numbers(context: ProbeContext, name: str, claim: Claim | Unknown) -> Observation:
    import torch

    samples = torch.randn(65536, device=context.device).cpu()
    mean, deviation = float(samples.mean()), float(samples.std())
    plausible = bool(torch.isfinite(samples).all()) and abs(mean) < 0.03 and abs(deviation - 1) < 0.03
    first, again, other = (
        torch.randn(64, device=context.device, generator=torch.Generator(context.device).manual_seed(seed)).cpu()
        for seed in (7, 7, 8)
    )
    reproducible = torch.equal(first, again) and not torch.equal(first, other)
    seeding = "determines" if reproducible else "does not determine"
    detail = f"mean {mean:.3f}, deviation {deviation:.3f}; a seed {seeding} the noise"
    return Observation("yes" if plausible and reproducible else "wrong", detail)


def _probe_data_dependent_shapes(context: ProbeContext, name: str, claim: Claim | Unknown) -> Observation:
    import torch

    def check_indexing(count: int) -> bool:
        values = torch.zeros(64)
        values[:count] = 1.0
        on_device = values.to(context.device)
        indices, masked = on_device.nonzero().cpu(), on_device[on_device > 0].cpu()
        return torch.equal(indices, values.nonzero()) and torch.equal(masked, values[values > 0])

    right, extra_ms = _time_first_runs(check_indexing, [3, 7, 12, 20, 31, 45, 57])
    if not right:
        return Observation("wrong", "nonzero or boolean indexing differs from the CPU")
    slow = extra_ms > _SLOW_SHAPE_MS and not context.virtual
    return Observation(
        "slow" if slow else "yes", f"nonzero and boolean indexing are right; a new size takes {extra_ms:.1f} ms longer"
    )


def _probe_new_shapes(context: ProbeContext, name: str, claim: Claim | Unknown) -> Observation:
    import torch

    def multiply(size: int) -> bool:
        matrix = seeded_randn((size, size)).to(context.device)
        return bool(torch.isfinite(torch.softmax(matrix @ matrix, -1).cpu()).all())

    right, extra_ms = _time_first_runs(multiply, [33, 57, 90, 121, 177, 203, 251])
    seen = "wrong" if not right else "slow" if extra_ms > _SLOW_SHAPE_MS else "yes"
    return Observation(seen, f"the first product in a new shape takes {extra_ms:.1f} ms longer than the second")


def _time_first_runs(run: Callable[[int], bool], sizes: list[int]) -> tuple[bool, float]:
    """Run each size twice; return whether all results are correct and how much slower first runs are.

    The second value is the median difference between the first and the second run, in milliseconds.
    """
    # The run before the loop loads the kernels, and the difference below is the cost of the new shape.
    right, extra = run(sizes[0] + 1), []
    for size in sizes:
        times = []
        for _ in range(2):
            start = time.perf_counter()
            right = run(size) and right
            times.append(time.perf_counter() - start)
        extra.append(1000 * (times[0] - times[1]))
    return right, max(0.0, statistics.median(extra))


def _probe_round_trip(context: ProbeContext, name: str, claim: Claim | Unknown) -> Observation:
    import torch

    def measure(device: torch.device) -> float:
        counter = torch.zeros((), device=device)
        times = []
        for _ in range(200):
            counter = counter + 1  # work for `item` to wait for
            start = time.perf_counter()
            counter.item()
            times.append(time.perf_counter() - start)
        return 1e6 * statistics.median(times)

    if context.virtual:
        torch.zeros((), device=context.device).item()
        return Observation("yes", "the ledger has the effect")
    device_us, cpu_us = measure(context.device), measure(torch.device("cpu"))
    detail = f"item() after an addition takes {device_us:.1f} µs, {cpu_us:.1f} µs on the CPU (medians of 200)"
    return Observation("slow" if device_us > _SLOW_READ * cpu_us else "yes", detail)


def _probe_batches(context: ProbeContext, name: str, claim: Claim | Unknown) -> Observation:
    import torch

    unet = _make_unet().to(context.device)
    images = seeded_randn((4, 3, 16, 16)).to(context.device)
    batched = unet(images, 10).sample.cpu()
    single = torch.cat([unet(image[None], 10).sample.cpu() for image in images])
    difference = float((batched - single).abs().max())
    right = difference <= _BATCH_TOLERANCE  # false for NaN
    detail = f"a batch of four through a UNet differs from single images by {difference:.1e}, "
    detail += f"{_BATCH_TOLERANCE:.0e} allowed"
    return Observation("yes" if right else "wrong", detail)


def _make_unet() -> Any:
    import torch
    from diffusers import UNet2DModel

    # A fixed seed, without a change to the random state of the caller.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        unet: Any = UNet2DModel(
            sample_size=16,
            block_out_channels=(32, 64),
            layers_per_block=1,
            attention_head_dim=8,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        )
    return unet.eval()


def _probe_training(context: ProbeContext, name: str, claim: Claim | Unknown) -> Observation:
    import torch

    def compute_gradients(device: torch.device) -> torch.Tensor:
        weights = (seeded_randn((16, 16), 1) / 4).to(device).requires_grad_()
        loss = torch.nn.functional.silu(seeded_randn((8, 16), 2).to(device) @ weights).square().mean()
        loss.backward()
        assert weights.grad is not None
        return weights.grad.cpu()

    with torch.enable_grad():
        actual, expected = compute_gradients(context.device), compute_gradients(torch.device("cpu"))
    difference = float((actual - expected).abs().max())
    detail = f"the gradients of a layer differ from the CPU's by {difference:.1e}"
    return Observation("yes" if difference <= _TOLERANCE else "wrong", detail)


def _probe_compiler(context: ProbeContext, name: str, claim: Compiler | Unknown) -> Observation:
    import torch

    if context.quick:
        return Observation("", "skipped by --quick")
    if isinstance(claim, Unknown):
        return Observation("", "the sheet names no compiler backend")

    def compute(values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(values * 2 + 1).sum(-1)

    values = seeded_randn((8, 32))
    compiled: Any = torch.compile(compute, backend=claim.backend, fullgraph=claim.fullgraph, dynamic=False)
    try:
        actual = compiled(values.to(context.device)).cpu()
    except Exception as error:
        if _NO_TOOLS.search(f"{type(error).__name__} {error}"):
            return Observation("", f"the tools of the compiler are missing: {describe_error(error)}")
        raise
    difference = float((actual - compute(values)).abs().max())
    detail = f"a small function compiled with {claim.backend} differs by {difference:.1e}"
    return Observation("yes" if difference <= _TOLERANCE else "wrong", detail)


def _probe_product(context: ProbeContext, name: str, claim: Product) -> Observation:
    if claim.name != context.product:
        return Observation(
            "", f"this is {context.product}" if context.product else "the device does not report its product"
        )
    if claim.memory_bytes is None:
        return Observation("", "the sheet has no memory size for it")
    total = context.driver.memory(context.index).total_bytes
    close = abs(total - claim.memory_bytes) <= _MEMORY_TOLERANCE * claim.memory_bytes
    detail = f"reports {total / 1e9:.1f} GB of memory; the sheet says {claim.memory_bytes / 1e9:.1f} GB"
    return Observation("yes" if close else "wrong", detail)


_PROBES: dict[str, Callable[[ProbeContext, str, Any], Observation]] = {
    "dtypes": probe_dtype_claim,
    "random_numbers": _probe_random_numbers,
    "data_dependent_shapes": _probe_data_dependent_shapes,
    "new_shapes": _probe_new_shapes,
    "host_round_trip": _probe_round_trip,
    "batches": _probe_batches,
    "training": _probe_training,
    "largest_tensor": probe_size,
    "operations": probe_operations,
    "quirks": probe_quirk,
    "compiler": _probe_compiler,
    "products": _probe_product,
}
