"""Asking a device about the claims of its sheet, one by one: what it does, and in which figures.

Each probe returns an `Observation`; a device error is one too, and a probe that does not fit in memory is skipped.
A virtual device is probed only for what it enforces; limits that it only records are read from its ledger.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from anyaccel.backends.claim import Claim, Limit, Unknown
from anyaccel.backends.evidence import Finding, Verdict
from anyaccel.backends.out_of_memory import is_out_of_memory
from anyaccel.backends.sheet import Compiler, Product, Sheet
from anyaccel.verification.context import Observation, ProbeContext, describe_error, fill
from anyaccel.verification.probe_operations import probe_operations, probe_quirk, probe_size
from anyaccel.verification.probe_types import probe_type

if TYPE_CHECKING:
    import torch

__all__ = ["find_claims", "judge", "probe"]

_BATCH_TOLERANCE = 1e-3
_TOLERANCE = 1e-4
"""For sums of few numbers near 1, in float32."""
_SLOW_READ = 3.0
"""A read that takes so many times as long as one on the host is slow."""
_SLOW_SHAPE_MS = 10.0
"""A first run that takes so much longer than the second one was compiled."""
_LABEL_SHARE = 0.1
_ENFORCED = ("dtypes", "random_numbers", "data_dependent_shapes", "host_round_trip", "largest_tensor", "operations")
"""What virtual devices enforce."""
_NO_TOOLS = re.compile(r"C(\+\+)? compiler|TritonMissing|No module named|Python\.h", re.IGNORECASE)


def find_claims(sheet: Sheet) -> list[str]:
    """The claims of a sheet that are about the device's behaviour, in its order."""
    return [name for name, _ in sheet.claims() if name.split(".")[0] in _PROBES]


def probe(bench: ProbeContext, name: str) -> Finding:
    """Hold one claim against the device."""
    claim = dict(bench.sheet.claims())[name]
    reason = _find_reason_against(bench, name, claim)
    return judge(bench.sheet, name, Observation("", reason) if reason else _look(bench, name, claim))


def judge(sheet: Sheet, name: str, sight: Observation) -> Finding:
    """What was seen, beside what the sheet says."""
    claim = dict(sheet.claims())[name]
    expected = _expect(claim)
    verdict: Verdict = "agrees" if sight.seen == expected else "contradicts"
    if isinstance(claim, Unknown):
        verdict = "new"
    return Finding(
        claim=name,
        expected=expected,
        seen=sight.seen,
        verdict=verdict if sight.seen else "not tried",
        detail=sight.detail,
    )


def _expect(claim: Claim | Unknown) -> str:
    if isinstance(claim, Unknown):
        return "not known"
    return claim.effect if isinstance(claim, Limit) else "yes"


def _find_reason_against(bench: ProbeContext, name: str, claim: Claim | Unknown) -> str:
    """Why a claim is not tried; empty where it is."""
    if isinstance(claim, Limit) and claim.conditional:
        where = ", ".join([*claim.only_on, *claim.only_if])
        return f"it holds for {where}, and the device does not say whether it is one of them"
    if not bench.virtual:
        return ""
    if isinstance(claim, Unknown):
        return "a virtual device knows no more than its sheet"
    if name.split(".")[0] not in _ENFORCED:
        return "a virtual device does not stand for it"
    if isinstance(claim, Limit) and claim.evidence == "inferred" and claim.contradicted_by:
        return "a virtual device does not enforce what is inferred and contradicted"
    return ""


def _look(bench: ProbeContext, name: str, claim: Claim | Unknown) -> Observation:
    """Run the probe; whatever the device raises is what was seen."""
    import torch

    if bench.accelerator is not None:
        bench.accelerator.ledger.clear()
    try:
        with torch.no_grad():
            sight = _PROBES[name.split(".")[0]](bench, name, claim)
    except ImportError as error:
        return Observation("", f"a library is missing: {describe_error(error)}")
    except Exception as error:  # noqa: BLE001 - an error of the device is a finding, and is shown with its words
        if is_out_of_memory(error):
            return Observation("", f"the memory did not suffice: {describe_error(error)}")
        sight = Observation("error", describe_error(error))
    if bench.accelerator is not None and sight.seen == "yes":
        met = next((row.effect for row in bench.accelerator.ledger.rows() if row.limit == name), None)
        return sight if met is None else Observation(met, "as the virtual device wrote down")
    return sight


def _probe_random_numbers(bench: ProbeContext, name: str, claim: Claim | Unknown) -> Observation:
    import torch

    drawn = torch.randn(65536, device=bench.device).cpu()
    mean, deviation = float(drawn.mean()), float(drawn.std())
    plausible = bool(torch.isfinite(drawn).all()) and abs(mean) < 0.03 and abs(deviation - 1) < 0.03
    first, again, other = (
        torch.randn(64, device=bench.device, generator=torch.Generator(bench.device).manual_seed(seed)).cpu()
        for seed in (7, 7, 8)
    )
    determined = torch.equal(first, again) and not torch.equal(first, other)
    detail = f"mean {mean:.3f}, deviation {deviation:.3f}; one seed gives {'one' if determined else 'no one'} noise"
    return Observation("yes" if plausible and determined else "wrong", detail)


def _probe_data_dependent_shapes(bench: ProbeContext, name: str, claim: Claim | Unknown) -> Observation:
    import torch

    def find(count: int) -> bool:
        values = torch.zeros(64)
        values[:count] = 1.0
        there = values.to(bench.device)
        places, masked = there.nonzero().cpu(), there[there > 0].cpu()
        return torch.equal(places, values.nonzero()) and torch.equal(masked, values[values > 0])

    right, extra_ms = _time_first_runs(find, [3, 7, 12, 20, 31, 45, 57])
    if not right:
        return Observation("wrong", "nonzero or a mask differs from the host's")
    slow = extra_ms > _SLOW_SHAPE_MS and not bench.virtual
    return Observation(
        "slow" if slow else "yes", f"nonzero and a mask are right; a new size takes {extra_ms:.1f} ms longer"
    )


def _probe_new_shapes(bench: ProbeContext, name: str, claim: Claim | Unknown) -> Observation:
    import torch

    def multiply(size: int) -> bool:
        there = fill((size, size)).to(bench.device)
        return bool(torch.isfinite(torch.softmax(there @ there, -1).cpu()).all())

    right, extra_ms = _time_first_runs(multiply, [33, 57, 90, 121, 177, 203, 251])
    seen = "wrong" if not right else "slow" if extra_ms > _SLOW_SHAPE_MS else "yes"
    return Observation(seen, f"a product in a new shape takes {extra_ms:.1f} ms longer than the second time")


def _time_first_runs(run: Callable[[int], bool], sizes: list[int]) -> tuple[bool, float]:
    """Whether all is right, and how many milliseconds the first run of a size takes more than the second (median)."""
    right, extra = run(sizes[0] + 1), []
    for size in sizes:
        times = []
        for _ in range(2):
            start = time.perf_counter()
            right = run(size) and right
            times.append(time.perf_counter() - start)
        extra.append(1000 * (times[0] - times[1]))
    return right, max(0.0, statistics.median(extra))


def _probe_round_trip(bench: ProbeContext, name: str, claim: Claim | Unknown) -> Observation:
    import torch

    def measure(device: torch.device) -> float:
        number = torch.zeros((), device=device)
        times = []
        for _ in range(200):
            number = number + 1
            start = time.perf_counter()
            number.item()
            times.append(time.perf_counter() - start)
        return 1e6 * statistics.median(times)

    if bench.virtual:
        torch.zeros((), device=bench.device).item()
        return Observation("yes", "the ledger says what it costs")
    there, here = measure(bench.device), measure(torch.device("cpu"))
    detail = f"item() after an addition takes {there:.1f} µs, {here:.1f} µs on the host (medians of 200)"
    return Observation("slow" if there > _SLOW_READ * here else "yes", detail)


def _probe_batches(bench: ProbeContext, name: str, claim: Claim | Unknown) -> Observation:
    import torch

    unet = _make_unet().to(bench.device)
    pictures = fill((4, 3, 16, 16)).to(bench.device)
    together = unet(pictures, 10).sample.cpu()
    alone = torch.cat([unet(picture[None], 10).sample.cpu() for picture in pictures])
    difference = float((together - alone).abs().max())
    right = difference <= _BATCH_TOLERANCE  # not a number is not right either
    detail = f"four pictures through a UNet differ from each alone by {difference:.1e}, {_BATCH_TOLERANCE:.0e} allowed"
    return Observation("yes" if right else "wrong", detail)


def _make_unet() -> Any:
    import torch
    from diffusers import UNet2DModel

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


def _probe_training(bench: ProbeContext, name: str, claim: Claim | Unknown) -> Observation:
    import torch

    def find_gradients(device: torch.device) -> torch.Tensor:
        weights = (fill((16, 16), 1) / 4).to(device).requires_grad_()
        loss = torch.nn.functional.silu(fill((8, 16), 2).to(device) @ weights).square().mean()
        loss.backward()
        assert weights.grad is not None
        return weights.grad.cpu()

    with torch.enable_grad():
        there, here = find_gradients(bench.device), find_gradients(torch.device("cpu"))
    difference = float((there - here).abs().max())
    detail = f"the gradients of a layer differ from the host's by {difference:.1e}"
    return Observation("yes" if difference <= _TOLERANCE else "wrong", detail)


def _probe_compiler(bench: ProbeContext, name: str, claim: Compiler | Unknown) -> Observation:
    import torch

    if bench.quick:
        return Observation("", "left out, to be quick")
    if isinstance(claim, Unknown):
        return Observation("", "the sheet names no backend to compile with")

    def compute(values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(values * 2 + 1).sum(-1)

    values = fill((8, 32))
    compiled: Any = torch.compile(compute, backend=claim.backend, fullgraph=claim.fullgraph, dynamic=False)
    try:
        there = compiled(values.to(bench.device)).cpu()
    except Exception as error:
        if _NO_TOOLS.search(f"{type(error).__name__} {error}"):
            return Observation("", f"the compiler's own tools are not here: {describe_error(error)}")
        raise
    difference = float((there - compute(values)).abs().max())
    detail = f"a small function compiled with {claim.backend} differs by {difference:.1e}"
    return Observation("yes" if difference <= _TOLERANCE else "wrong", detail)


def _probe_product(bench: ProbeContext, name: str, claim: Product) -> Observation:
    if claim.name != bench.product:
        return Observation("", f"this is {bench.product}" if bench.product else "the device does not tell its product")
    if claim.memory_bytes is None:
        return Observation("", "the sheet gives no figure for its memory")
    total = bench.driver.memory(bench.index).total_bytes
    near = abs(total - claim.memory_bytes) <= _LABEL_SHARE * claim.memory_bytes
    detail = f"reports {total / 1e9:.1f} GB of memory, and the sheet says {claim.memory_bytes / 1e9:.1f}"
    return Observation("yes" if near else "wrong", detail)


_PROBES: dict[str, Callable[[ProbeContext, str, Any], Observation]] = {
    "dtypes": probe_type,
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
