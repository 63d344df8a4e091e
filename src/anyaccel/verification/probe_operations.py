"""Probes for single operations, sizes and quirks; each probe calls the operation that it checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from anyaccel.backends.claim import OperationLimit, Quirk, SizeLimit, Unknown, Yes
from anyaccel.backends.out_of_memory import is_out_of_memory
from anyaccel.backends.quirks import HALF_KERNELS_MISSING, HOST_NUMBER_OFFSET_IGNORED, NON_CONTIGUOUS_ATTENTION
from anyaccel.verification.context import Observation, ProbeContext, describe_error, seeded_randn

if TYPE_CHECKING:
    import torch

__all__ = ["probe_operations", "probe_quirk", "probe_size"]

# Absolute tolerance for short sums of values near 1, in half precision or better.
_TOLERANCE = 2e-2


def probe_operations(context: ProbeContext, name: str, limit: OperationLimit) -> Observation:
    """Call every operation in a limit with every dtype in the limit, and check the results.

    The observed effect is `mixed` if the calls have different effects.
    """
    calls = _LARGE_CALLS if limit.past_elements is not None else _CALLS
    unknown = [operation for operation in limit.operations if operation not in calls]
    if unknown:
        return Observation("", f"no probe for {', '.join(unknown)}")
    if limit.past_elements is not None:
        return _call_large(context, limit)
    observations = {
        f"{operation} in {dtype}": _call_small(context, operation, dtype)
        for operation in limit.operations
        for dtype in limit.dtypes or ("float32",)
    }
    effects = {observation.seen for observation in observations.values()}
    detail = "; ".join(
        f"{call}: {observation.detail or observation.seen}" for call, observation in observations.items()
    )
    return Observation(effects.pop() if len(effects) == 1 else "mixed", detail[:600])


def _call_small(context: ProbeContext, operation: str, dtype_name: str) -> Observation:
    import torch

    dtype: torch.dtype = getattr(torch, dtype_name)
    try:
        actual = _CALLS[operation](context.device, dtype).cpu()
    except Exception as error:  # an error of the device is a result
        if is_out_of_memory(error):
            raise
        return Observation("error", describe_error(error))
    # A virtual device computes the right values and records that the real one would not.
    violations = context.accelerator.ledger.rows("wrong") if context.accelerator is not None else []
    if violations:
        return Observation("wrong")
    try:
        expected = _CALLS[operation](torch.device("cpu"), dtype)
    except (RuntimeError, TypeError):
        return Observation("yes", "runs; the CPU has no kernel to compare with")
    same = torch.allclose(_widen(actual), _widen(expected), atol=_TOLERANCE, equal_nan=True)
    return Observation("yes" if same else "wrong")


def _widen(value: torch.Tensor) -> torch.Tensor:
    return value if value.is_complex() else value.double()


def _values(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return seeded_randn(shape).to(dtype).to(device)


def _ignore_input(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    import torch

    # With beta=0, torch specifies that NaN in the input is not propagated.
    nan_input = torch.full((1, 4, 4), math.nan, dtype=dtype).to(device)
    identity = torch.eye(4, dtype=dtype)[None].to(device)
    return torch.baddbmm(nan_input, identity, identity, beta=0)


def _fill_by_mask(device: torch.device, dtype: torch.dtype, in_place: bool) -> torch.Tensor:
    import torch

    values, mask = torch.arange(8).to(dtype).to(device), (torch.arange(8) > 3).to(device)
    return values.masked_fill_(mask, 1) if in_place else values.masked_fill(mask, 1)


def _multiply_integers(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    import torch

    from anyaccel.upstream.torch_internals import int_mm

    # CUDA rejects 16 rows or fewer: https://github.com/pytorch/pytorch/pull/178469
    values = (torch.arange(1024) % 7).to(torch.int8).reshape(32, 32).to(device)
    return int_mm(values, values)


def _take(device: torch.device, dtype: torch.dtype, take: Callable[[Any, Any], Any]) -> torch.Tensor:
    import torch

    return take(_values((8,), device, dtype), torch.tensor([1, 5, 2]).to(device))  # type: ignore[no-any-return]


def _combine(device: torch.device, dtype: torch.dtype, combine: Callable[[Any, Any], Any]) -> torch.Tensor:
    values = _values((8,), device, dtype)
    return combine(values, values)  # type: ignore[no-any-return]


def _repeat(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    import torch

    return torch.repeat_interleave(torch.tensor([1, 2, 3]).to(device))


def _transpose_3d(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    import torch

    kernel = _values((4, 4, 2, 2, 2), device, dtype) / 8
    return torch.nn.functional.conv_transpose3d(_values((1, 4, 3, 3, 3), device, dtype), kernel)


def _where(left: Any, right: Any) -> Any:
    import torch

    return torch.where(torch.ones(8, dtype=torch.bool).to(left.device), left, right)


_CALLS: dict[str, Callable[[torch.device, torch.dtype], torch.Tensor]] = {
    "baddbmm": _ignore_input,
    "masked_fill": lambda device, dtype: _fill_by_mask(device, dtype, in_place=False),
    "masked_fill_": lambda device, dtype: _fill_by_mask(device, dtype, in_place=True),
    "_int_mm": _multiply_integers,
    "index": lambda device, dtype: _take(device, dtype, lambda values, indices: values[indices]),
    "index_select": lambda device, dtype: _take(device, dtype, lambda values, indices: values.index_select(0, indices)),
    "gather": lambda device, dtype: _take(device, dtype, lambda values, indices: values.gather(0, indices)),
    "repeat_interleave.Tensor": _repeat,
    "conv_transpose3d": _transpose_3d,
    "add": lambda device, dtype: _combine(device, dtype, lambda left, right: left + right),
    "mul": lambda device, dtype: _combine(device, dtype, lambda left, right: left * right),
    "eq": lambda device, dtype: _combine(device, dtype, lambda left, right: left == right),
    "ne": lambda device, dtype: _combine(device, dtype, lambda left, right: left != right),
    "gt": lambda device, dtype: _combine(device, dtype, lambda left, right: left > right),
    "lt": lambda device, dtype: _combine(device, dtype, lambda left, right: left < right),
    "where": lambda device, dtype: _combine(device, dtype, _where),
}


def _call_large(context: ProbeContext, limit: OperationLimit) -> Observation:
    """Run operations in float16 just above the size in the limit, and check two corners of each result.

    The expected values are computed from small inputs.
    """
    elements = limit.past_elements or 0
    # Two bytes per element; the factor covers the input, the result and the workspace of the kernel.
    needed, spare = 5 * elements * 2, context.spare_bytes()
    if needed > spare:
        return Observation(
            "", f"requires {needed / 2**30:.1f} GiB; a third of the free memory is {spare / 2**30:.1f} GiB"
        )
    differences = [_LARGE_CALLS[operation](context.device, elements) for operation in limit.operations]
    context.driver.empty_cache()
    operations = f"{', '.join(limit.operations)} past {elements} elements in float16"
    detail = f"{operations} differs from small inputs by {_worst(differences):.1e}, {_TOLERANCE:.0e} allowed"
    # `<=` is false for NaN, so NaN counts as wrong.
    return Observation("yes" if all(value <= _TOLERANCE for value in differences) else "wrong", detail)


def _convolve_large(device: torch.device, elements: int) -> float:
    import torch

    channels = 32
    side = math.isqrt(elements // channels) + 2
    image = torch.zeros(1, channels, side, side, dtype=torch.float16, device=device)
    # Filled in strips: `uniform_` on the whole tensor could hit the limit itself.
    for row in range(0, side, 1024):
        image[:, :, row : row + 1024].uniform_(-1, 1)
    kernel = (seeded_randn((channels, channels, 3, 3)) / 17).half().to(device)
    whole = torch.nn.functional.conv2d(image, kernel, padding=1)
    # Per corner: the compared output, the input for it with a margin, and the compared part of that result. The margin
    # is larger than the kernel, so that padding inside the image has no effect.
    corners = ((slice(0, 8), slice(0, 16), slice(0, 8)), (slice(-8, None), slice(-16, None), slice(-8, None)))
    return _worst(
        _difference(
            whole[:, :, output, output],
            torch.nn.functional.conv2d(image[:, :, crop, crop].contiguous(), kernel, padding=1)[:, :, inner, inner],
        )
        for output, crop, inner in corners
    )


def _upsample_large(device: torch.device, elements: int) -> float:
    import torch

    channels = 32
    side = math.isqrt(elements // channels) // 2 + 2
    image = torch.empty(1, channels, side, side, dtype=torch.float16, device=device)
    image = image.to(memory_format=torch.channels_last).fill_(0.5)
    whole = torch.nn.functional.interpolate(image, scale_factor=2, mode="nearest")
    return _worst(
        _difference(whole[:, :, corner, corner], image[:, :, :8, :8]) for corner in (slice(0, 8), slice(-8, None))
    )


def _multiply_large(device: torch.device, elements: int) -> float:
    import torch

    side = math.isqrt(elements) + 1
    column = torch.linspace(0.5, 1, side, dtype=torch.float16).to(device)
    whole = torch.bmm(column[None, :, None], column[None, None, :])[0]
    return _worst(
        _difference(whole[corner, corner], column[corner, None] * column[None, corner])
        for corner in (slice(0, 8), slice(-8, None))
    )


def _worst(differences: Iterable[float]) -> float:
    """Return the largest difference; NaN counts as larger than any number."""
    return max(differences, key=lambda value: math.inf if math.isnan(value) else value)


def _difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.float() - expected.float()).abs().max().item())


_LARGE_CALLS: dict[str, Callable[[torch.device, int], float]] = {
    "convolution": _convolve_large,
    "upsample_nearest2d": _upsample_large,
    "bmm": _multiply_large,
}


def probe_size(context: ProbeContext, name: str, claim: SizeLimit | Yes | Unknown) -> Observation:
    """Check that a tensor or attention result just above the size limit contains correct values."""
    if not isinstance(claim, SizeLimit):
        return Observation("", "the sheet names no size limit")
    scores = claim.of == "attention_scores"
    if scores and context.virtual:
        return Observation("", f"the CPU would have to compute {claim.amount} scores")
    needed, spare = claim.amount * (4 if scores else 1), context.spare_bytes()
    if needed > spare:
        return Observation(
            "", f"requires {needed / 2**30:.1f} GiB; a third of the free memory is {spare / 2**30:.1f} GiB"
        )
    right = _attend_past(context, claim.amount) if scores else _write_past(context, claim.amount)
    context.driver.empty_cache()
    return Observation(
        "yes" if right else "wrong", f"allocated {claim.amount + 8} {claim.unit}, wrote and read back both ends"
    )


def _write_past(context: ProbeContext, amount: int) -> bool:
    import torch

    block = torch.empty(amount + 8, dtype=torch.uint8, device=context.device)
    block[:8], block[-8:] = 3, 7
    return bool((block[:8] == 3).all().item() and (block[-8:] == 7).all().item())


def _attend_past(context: ProbeContext, amount: int) -> bool:
    import torch

    attend = torch.nn.functional.scaled_dot_product_attention
    length = math.isqrt(amount) + 1
    query = seeded_randn((1, 1, length, 8)).half().to(context.device)
    whole = attend(query, query, query)
    # Rows of attention are independent, so the first and last queries can be computed separately.
    ends = (slice(0, 64), slice(-64, None))
    pairs = ((whole[:, :, end], attend(query[:, :, end].contiguous(), query, query)) for end in ends)
    return all(_difference(actual, expected) <= _TOLERANCE for actual, expected in pairs)


def probe_quirk(context: ProbeContext, name: str, quirk: Quirk) -> Observation:
    """Run the probe for a quirk; return an empty observation if the quirk has no probe."""
    reproduce = _QUIRKS.get(quirk.name)
    return Observation("", "no probe for this quirk") if reproduce is None else reproduce(context)


def _normalize_half(context: ProbeContext) -> Observation:
    import torch

    values = seeded_randn((1, 8, 4, 4)).half().to(context.device)
    torch.nn.functional.local_response_norm(values, 2).cpu()
    return Observation("yes", "LocalResponseNorm runs in float16")


def _attend_to_permuted(context: ProbeContext) -> Observation:
    import torch

    attend: Any = torch.nn.functional.scaled_dot_product_attention
    tensors = [seeded_randn((2, 64, 4, 32), seed) for seed in (1, 2, 3)]
    expected = attend(*(tensor.permute(0, 2, 1, 3).contiguous() for tensor in tensors))
    actual = attend(*(tensor.to(context.device).permute(0, 2, 1, 3) for tensor in tensors)).cpu()
    difference = float((actual - expected).abs().max())
    detail = f"attention with permuted query, key and value differs by {difference:.1e}"
    return Observation("yes" if difference <= _TOLERANCE else "wrong", detail)


def _add_offset_scalar(context: ProbeContext) -> Observation:
    import torch

    # `sigmas[3]` is a CPU scalar with a storage offset, which some drivers ignore.
    sigmas = torch.tensor([1.0, 2.0, 3.0, 4.0])
    actual = (torch.zeros(4, device=context.device) + sigmas[3]).cpu()
    right = bool((actual == 4.0).all())
    return Observation("yes" if right else "wrong", f"0 + sigmas[3] is {actual[0].item():.0f}, expected 4")


_QUIRKS: dict[str, Callable[[ProbeContext], Observation]] = {
    HALF_KERNELS_MISSING: _normalize_half,
    NON_CONTIGUOUS_ATTENTION: _attend_to_permuted,
    HOST_NUMBER_OFFSET_IGNORED: _add_offset_scalar,
}
