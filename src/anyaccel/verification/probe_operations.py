"""Asking a device about single operations, sizes and quirks: each is called as its limit describes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from anyaccel.backends.claim import OperationLimit, Quirk, SizeLimit, Unknown, Yes
from anyaccel.backends.out_of_memory import is_out_of_memory
from anyaccel.backends.quirks import HALF_KERNELS_MISSING, HOST_NUMBER_OFFSET_IGNORED, NON_CONTIGUOUS_ATTENTION
from anyaccel.verification.context import Observation, ProbeContext, describe_error, fill

if TYPE_CHECKING:
    import torch

__all__ = ["probe_operations", "probe_quirk", "probe_size"]

_TOLERANCE = 2e-2
"""For sums of few numbers near 1, in half precision at most."""


def probe_operations(bench: ProbeContext, name: str, limit: OperationLimit) -> Observation:
    """Call every operation of a limit in every type that it names; it agrees only if all of them do as it says."""
    calls = _LARGE_CALLS if limit.past_elements is not None else _CALLS
    unknown = [operation for operation in limit.operations if operation not in calls]
    if unknown:
        return Observation("", f"no call of {', '.join(unknown)} is written for this")
    if limit.past_elements is not None:
        return _call_large(bench, limit)
    seen = {
        f"{operation} in {dtype}": _call_small(bench, operation, dtype)
        for operation in limit.operations
        for dtype in limit.dtypes or ("float32",)
    }
    effects = {sight.seen for sight in seen.values()}
    detail = "; ".join(f"{call}: {sight.detail or sight.seen}" for call, sight in seen.items())
    return Observation(effects.pop() if len(effects) == 1 else "mixed", detail[:600])


def _call_small(bench: ProbeContext, operation: str, dtype: str) -> Observation:
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    try:
        there = _CALLS[operation](bench.device, kind).cpu()
    except Exception as error:  # an error of the device is a finding
        if is_out_of_memory(error):
            raise
        return Observation("error", describe_error(error))
    met = bench.accelerator.ledger.rows("wrong") if bench.accelerator is not None else []
    if met:
        return Observation("wrong")
    try:
        here = _CALLS[operation](torch.device("cpu"), kind)
    except (RuntimeError, TypeError):
        return Observation("yes", "runs; the host cannot say whether it is right")
    same = torch.allclose(_widen(there), _widen(here), atol=_TOLERANCE, equal_nan=True)
    return Observation("yes" if same else "wrong")


def _widen(value: torch.Tensor) -> torch.Tensor:
    return value if value.is_complex() else value.double()


def _numbers(shape: tuple[int, ...], device: torch.device, kind: torch.dtype) -> torch.Tensor:
    return fill(shape).to(kind).to(device)


def _silence_input(device: torch.device, kind: torch.dtype) -> torch.Tensor:
    import torch

    nothing = torch.full((1, 4, 4), math.nan, dtype=kind).to(device)
    one = torch.eye(4, dtype=kind)[None].to(device)
    return torch.baddbmm(nothing, one, one, beta=0)


def _fill_by_mask(device: torch.device, kind: torch.dtype, in_place: bool) -> torch.Tensor:
    import torch

    values, mask = torch.arange(8).to(kind).to(device), (torch.arange(8) > 3).to(device)
    return values.masked_fill_(mask, 1) if in_place else values.masked_fill(mask, 1)


def _multiply_integers(device: torch.device, kind: torch.dtype) -> torch.Tensor:
    import torch

    from anyaccel.upstream.torch_internals import int_mm

    # 32 on each side: some kernels take no smaller matrices.
    values = (torch.arange(1024) % 7).to(torch.int8).reshape(32, 32).to(device)
    return int_mm(values, values)


def _pick(device: torch.device, kind: torch.dtype, pick: Callable[[Any, Any], Any]) -> torch.Tensor:
    import torch

    return pick(_numbers((8,), device, kind), torch.tensor([1, 5, 2]).to(device))  # type: ignore[no-any-return]


def _combine(device: torch.device, kind: torch.dtype, combine: Callable[[Any, Any], Any]) -> torch.Tensor:
    values = _numbers((8,), device, kind)
    return combine(values, values)  # type: ignore[no-any-return]


def _repeat(device: torch.device, kind: torch.dtype) -> torch.Tensor:
    import torch

    return torch.repeat_interleave(torch.tensor([1, 2, 3]).to(device))


def _transpose_3d(device: torch.device, kind: torch.dtype) -> torch.Tensor:
    import torch

    kernel = _numbers((4, 4, 2, 2, 2), device, kind) / 8
    return torch.nn.functional.conv_transpose3d(_numbers((1, 4, 3, 3, 3), device, kind), kernel)


def _where(left: Any, right: Any) -> Any:
    import torch

    return torch.where(torch.ones(8, dtype=torch.bool).to(left.device), left, right)


_CALLS: dict[str, Callable[[torch.device, torch.dtype], torch.Tensor]] = {
    "baddbmm": _silence_input,
    "masked_fill": lambda device, kind: _fill_by_mask(device, kind, in_place=False),
    "masked_fill_": lambda device, kind: _fill_by_mask(device, kind, in_place=True),
    "_int_mm": _multiply_integers,
    "index": lambda device, kind: _pick(device, kind, lambda values, places: values[places]),
    "index_select": lambda device, kind: _pick(device, kind, lambda values, places: values.index_select(0, places)),
    "gather": lambda device, kind: _pick(device, kind, lambda values, places: values.gather(0, places)),
    "repeat_interleave.Tensor": _repeat,
    "conv_transpose3d": _transpose_3d,
    "add": lambda device, kind: _combine(device, kind, lambda left, right: left + right),
    "mul": lambda device, kind: _combine(device, kind, lambda left, right: left * right),
    "eq": lambda device, kind: _combine(device, kind, lambda left, right: left == right),
    "ne": lambda device, kind: _combine(device, kind, lambda left, right: left != right),
    "gt": lambda device, kind: _combine(device, kind, lambda left, right: left > right),
    "lt": lambda device, kind: _combine(device, kind, lambda left, right: left < right),
    "where": lambda device, kind: _combine(device, kind, _where),
}


def _call_large(bench: ProbeContext, limit: OperationLimit) -> Observation:
    """An operation just past the size of its limit, in float16; a corner is held against the same from a small part."""
    elements = limit.past_elements or 0
    needed, spare = 5 * elements * 2, bench.spare_bytes()  # the input, the result, and room for the kernel to work in
    if needed > spare:
        return Observation("", f"needs {needed / 2**30:.1f} GiB, a third of what is free is {spare / 2**30:.1f} GiB")
    differences = [_LARGE_CALLS[operation](bench.device, elements) for operation in limit.operations]
    bench.driver.empty_cache()
    asked = f"{', '.join(limit.operations)} past {elements} elements in float16"
    detail = f"{asked} differs from the same on a small part by {_worst(differences):.1e}, {_TOLERANCE:.0e} allowed"
    # Said this way round, what is not a number is wrong too.
    return Observation("yes" if all(one <= _TOLERANCE for one in differences) else "wrong", detail)


def _convolve_large(device: torch.device, elements: int) -> float:
    import torch

    channels = 32
    side = math.isqrt(elements // channels) + 2
    picture = torch.zeros(1, channels, side, side, dtype=torch.float16, device=device)
    for row in range(0, side, 1024):
        picture[:, :, row : row + 1024].uniform_(-1, 1)
    kernel = (fill((channels, channels, 3, 3)) / 17).half().to(device)
    whole = torch.nn.functional.conv2d(picture, kernel, padding=1)
    corners = ((slice(0, 8), slice(0, 16), slice(0, 8)), (slice(-8, None), slice(-16, None), slice(-8, None)))
    return _worst(
        _difference(
            whole[:, :, kept, kept],
            torch.nn.functional.conv2d(picture[:, :, part, part].contiguous(), kernel, padding=1)[:, :, within, within],
        )
        for kept, part, within in corners
    )


def _enlarge_large(device: torch.device, elements: int) -> float:
    import torch

    channels = 32
    side = math.isqrt(elements // channels) // 2 + 2
    picture = torch.empty(1, channels, side, side, dtype=torch.float16, device=device)
    picture = picture.to(memory_format=torch.channels_last).fill_(0.5)
    whole = torch.nn.functional.interpolate(picture, scale_factor=2, mode="nearest")
    return _worst(
        _difference(whole[:, :, part, part], picture[:, :, :8, :8]) for part in (slice(0, 8), slice(-8, None))
    )


def _multiply_large(device: torch.device, elements: int) -> float:
    import torch

    side = math.isqrt(elements) + 1
    column = torch.linspace(0.5, 1, side, dtype=torch.float16).to(device)
    whole = torch.bmm(column[None, :, None], column[None, None, :])[0]
    return _worst(
        _difference(whole[part, part], column[part, None] * column[None, part])
        for part in (slice(0, 8), slice(-8, None))
    )


def _worst(differences: Iterable[float]) -> float:
    """The largest; one that is not a number is worse than any."""
    return max(differences, key=lambda one: math.inf if math.isnan(one) else one)


def _difference(there: torch.Tensor, expected: torch.Tensor) -> float:
    return float((there.float() - expected.float()).abs().max().item())


_LARGE_CALLS: dict[str, Callable[[torch.device, int], float]] = {
    "convolution": _convolve_large,
    "upsample_nearest2d": _enlarge_large,
    "bmm": _multiply_large,
}


def probe_size(bench: ProbeContext, name: str, claim: SizeLimit | Yes | Unknown) -> Observation:
    """A tensor, or an attention call, just past the limit."""
    if not isinstance(claim, SizeLimit):
        return Observation("", "the sheet names no size to go past")
    scores = claim.of == "attention_scores"
    if scores and bench.virtual:
        return Observation("", f"the host would have to compute {claim.amount} scores")
    needed, spare = claim.amount * (4 if scores else 1), bench.spare_bytes()
    if needed > spare:
        return Observation("", f"needs {needed / 2**30:.1f} GiB, a third of what is free is {spare / 2**30:.1f} GiB")
    right = _attend_past(bench, claim.amount) if scores else _write_past(bench, claim.amount)
    bench.driver.empty_cache()
    return Observation(
        "yes" if right else "wrong", f"one of {claim.amount + 8} {claim.unit} was made, written and read back"
    )


def _write_past(bench: ProbeContext, amount: int) -> bool:
    import torch

    block = torch.empty(amount + 8, dtype=torch.uint8, device=bench.device)
    block[:8], block[-8:] = 3, 7
    return bool((block[:8] == 3).all().item() and (block[-8:] == 7).all().item())


def _attend_past(bench: ProbeContext, amount: int) -> bool:
    import torch

    attend = torch.nn.functional.scaled_dot_product_attention
    length = math.isqrt(amount) + 1
    query = fill((1, 1, length, 8)).half().to(bench.device)
    whole = attend(query, query, query)
    parts = (slice(0, 64), slice(-64, None))
    pairs = ((whole[:, :, part], attend(query[:, :, part].contiguous(), query, query)) for part in parts)
    return all(_difference(one, other) <= _TOLERANCE for one, other in pairs)


def probe_quirk(bench: ProbeContext, name: str, quirk: Quirk) -> Observation:
    """Show a quirk, where that can be done in a few lines."""
    show = _QUIRKS.get(quirk.name)
    return Observation("", "no probe is written for this quirk") if show is None else show(bench)


def _normalise_half(bench: ProbeContext) -> Observation:
    import torch

    values = fill((1, 8, 4, 4)).half().to(bench.device)
    torch.nn.functional.local_response_norm(values, 2).cpu()
    return Observation("yes", "LocalResponseNorm runs in float16")


def _attend_to_permuted(bench: ProbeContext) -> Observation:
    import torch

    attend: Any = torch.nn.functional.scaled_dot_product_attention
    parts = [fill((2, 64, 4, 32), seed) for seed in (1, 2, 3)]
    expected = attend(*(part.permute(0, 2, 1, 3).contiguous() for part in parts))
    there = attend(*(part.to(bench.device).permute(0, 2, 1, 3) for part in parts)).cpu()
    difference = float((there - expected).abs().max())
    detail = f"attention with permuted query, key and value differs by {difference:.1e}"
    return Observation("yes" if difference <= _TOLERANCE else "wrong", detail)


def _add_offset_number(bench: ProbeContext) -> Observation:
    import torch

    sigmas = torch.tensor([1.0, 2.0, 3.0, 4.0])
    seen = (torch.zeros(4, device=bench.device) + sigmas[3]).cpu()
    right = bool((seen == 4.0).all())
    return Observation("yes" if right else "wrong", f"0 + sigmas[3], which is 4, gives {seen[0].item():.0f}")


_QUIRKS: dict[str, Callable[[ProbeContext], Observation]] = {
    HALF_KERNELS_MISSING: _normalise_half,
    NON_CONTIGUOUS_ATTENTION: _attend_to_permuted,
    HOST_NUMBER_OFFSET_IGNORED: _add_offset_number,
}
