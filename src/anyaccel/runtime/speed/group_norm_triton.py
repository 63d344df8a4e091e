# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, misc, no-untyped-call"
"""Triton kernels for group normalization of channels-last images, with an optional SiLU.

Each program reads whole pixels, which are contiguous in memory. The first pass computes the mean and the sum of squared
differences per channel, a small second pass combines channels into groups, and the third pass normalizes. For
low-resolution images, a single kernel normalizes one group per program. Differences from a pivot are summed in float32,
which avoids cancellation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["normalize_groups"]

# Why a kernel of our own: in channels last, neighbors in memory belong to different groups, and Inductor's reduction
# over groups is slow. torch's CUDA kernel returns contiguous output, which the next convolution must convert back:
# https://github.com/pytorch/pytorch/issues/111824 (torch 2.13; a kernel for channels last was added later in
# https://github.com/pytorch/pytorch/pull/191945).

# Elements that one program holds at a time.
_TILE = 8192
# Programs per batch in the first pass: a few per multiprocessor.
_PROGRAMS = 512
# The maximum number of parts of a small image; the second pass combines this many in one load.
_PARTS = 128
# The maximum number of pixels of a small image.
_SMALL = 128 * 128
# The maximum number of pixels of an image that is normalized by one program per group.
_SINGLE_PASS = 16 * 16


@triton.jit
def _normalize_group(
    x, weight, bias, out, pixels, channels, epsilon,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Normalize one group of channels in one image, and apply SiLU if requested."""
    image, group = tl.program_id(0), tl.program_id(1)
    index = tl.arange(0, SIZE)
    inside = index < WIDTH
    column = group * WIDTH + index
    start = image.to(tl.int64) * pixels * channels
    # Differences from the first element: a plain sum of squares would cancel for a large mean.
    pivot = tl.load(x + start + group * WIDTH).to(tl.float32)
    total = tl.zeros((ROWS, SIZE), dtype=tl.float32)
    squares = tl.zeros((ROWS, SIZE), dtype=tl.float32)
    for first in range(0, pixels, ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row < pixels)[:, None] & inside[None, :]
        values = tl.load(x + start + row[:, None] * channels + column[None, :], mask=mask, other=0.0)
        difference = tl.where(mask, values.to(tl.float32) - pivot, 0.0)
        total += difference
        squares += difference * difference
    count = pixels * WIDTH
    mean_offset = tl.sum(tl.sum(total, axis=1), axis=0) / count
    variance = tl.maximum(tl.sum(tl.sum(squares, axis=1), axis=0) / count - mean_offset * mean_offset, 0.0)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) / tl.sqrt(variance + epsilon)
    shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32) - (pivot + mean_offset) * factor
    for first in range(0, pixels, ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row < pixels)[:, None] & inside[None, :]
        offset = start + row[:, None] * channels + column[None, :]
        values = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
        values = values * factor[None, :] + shift[None, :]
        if SILU:
            values = values / (1.0 + tl.exp(-values))
        tl.store(out + offset, values.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _measure_channels(
    x, stats, pixels, channels, tiles, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Compute each channel's mean and sum of squared deviations from the mean over a block of pixels."""
    image, part = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    inside = column < channels
    start = x + image.to(tl.int64) * pixels * channels
    first = part * tiles * ROWS
    pivot = tl.load(start + first.to(tl.int64) * channels + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    squares = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for tile in range(tiles):
        row = first + tile * ROWS + tl.arange(0, ROWS)
        mask = (row < pixels)[:, None] & inside[None, :]
        pointers = start + row.to(tl.int64)[:, None] * channels + column[None, :]
        values = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        difference = tl.where(mask, values - pivot[None, :], 0.0)
        total += difference
        squares += difference * difference
    count = tl.maximum(tl.minimum(pixels - first, tiles * ROWS), 1).to(tl.float32)
    mean_offset = tl.sum(total, axis=0) / count
    squares_sum = tl.sum(squares, axis=0) - mean_offset * mean_offset * count
    pointers = stats + (image * tl.num_programs(1) + part) * 2 * channels + column
    tl.store(pointers, pivot + mean_offset, mask=inside)
    tl.store(pointers + channels, tl.maximum(squares_sum, 0.0), mask=inside)


@triton.jit
def _combine_channels(
    stats, weight, bias, factors, pixels, channels, parts, rows, epsilon,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Compute the scale factor and shift of each channel from the mean and variance of its group."""
    image, group = tl.program_id(0), tl.program_id(1)
    index = tl.arange(0, SIZE)
    inside = index < WIDTH
    column = group * WIDTH + index
    start = stats + image * parts * 2 * channels
    total = tl.zeros((PARTS, SIZE), dtype=tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        mask = (part < parts)[:, None] & inside[None, :]
        means = tl.load(start + part[:, None] * 2 * channels + column[None, :], mask=mask, other=0.0)
        count = tl.minimum(tl.maximum(pixels - part * rows, 0), rows).to(tl.float32)
        total += means * count[:, None]
    mean = tl.sum(tl.sum(total, axis=1), axis=0) / (pixels * WIDTH)
    # Combine the variances of the parts (Chan et al.): within each part plus between the means.
    total = tl.zeros((PARTS, SIZE), dtype=tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        mask = (part < parts)[:, None] & inside[None, :]
        pointers = start + part[:, None] * 2 * channels + column[None, :]
        means = tl.load(pointers, mask=mask, other=0.0)
        squares_sums = tl.load(pointers + channels, mask=mask, other=0.0)
        count = tl.minimum(tl.maximum(pixels - part * rows, 0), rows).to(tl.float32)
        difference = tl.where(mask, means - mean, 0.0)
        total += squares_sums + difference * difference * count[:, None]
    variance = tl.sum(tl.sum(total, axis=1), axis=0) / (pixels * WIDTH)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) / tl.sqrt(variance + epsilon)
    shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32) - mean * factor
    tl.store(factors + image * 2 * channels + column, factor, mask=inside)
    tl.store(factors + image * 2 * channels + channels + column, shift, mask=inside)


@triton.jit
def _apply(
    x, factors, out, pixels, channels, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SILU: tl.constexpr
):  # fmt: skip
    """Multiply each channel by its scale factor, add its shift, and apply SiLU if requested."""
    image = tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    inside = column < channels
    factor = tl.load(factors + image * 2 * channels + column, mask=inside, other=0.0)
    shift = tl.load(factors + image * 2 * channels + channels + column, mask=inside, other=0.0)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = (row < pixels)[:, None] & inside[None, :]
    offset = image.to(tl.int64) * pixels * channels + row.to(tl.int64)[:, None] * channels + column[None, :]
    values = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    values = values * factor[None, :] + shift[None, :]
    if SILU:
        values = values / (1.0 + tl.exp(-values))
    tl.store(out + offset, values.to(out.dtype.element_ty), mask=mask)


@torch.library.triton_op("anyaccel::normalize_groups", mutates_args={})
def normalize_groups(
    x: torch.Tensor, groups: int, weight: torch.Tensor, bias: torch.Tensor, epsilon: float, silu: bool
) -> torch.Tensor:
    """Apply `group_norm`, and optionally `silu`, to a tensor of shape (images, channels, height, width)."""
    x = x.contiguous(memory_format=torch.channels_last)
    images, channels = x.shape[0], x.shape[1]
    pixels = x.shape[2] * x.shape[3]
    width = channels // groups
    out = torch.empty_like(x)
    run = torch.library.wrap_triton
    if pixels <= _SINGLE_PASS:
        size = triton.next_power_of_2(width)
        rows = min(_TILE // size, triton.next_power_of_2(pixels))
        run(_normalize_group)[(images, groups)](
            x, weight, bias, out, pixels, channels, epsilon,
            WIDTH=width, SIZE=size, ROWS=rows, SILU=silu, num_warps=max(1, min(16, rows * size // 256)),
        )  # fmt: skip
        return out
    columns = triton.next_power_of_2(channels)
    rows = max(1, _TILE // columns)
    blocks = triton.cdiv(pixels, rows)
    tiles = triton.cdiv(blocks, max(1, min(_PARTS if pixels <= _SMALL else _PROGRAMS, _PROGRAMS // images)))
    parts = triton.cdiv(blocks, tiles)
    stats = torch.empty((images, parts, 2, channels), device=x.device, dtype=torch.float32)
    factors = torch.empty((images, 2, channels), device=x.device, dtype=torch.float32)
    run(_measure_channels)[(images, parts)](x, stats, pixels, channels, tiles, ROWS=rows, COLUMNS=columns, num_warps=8)
    run(_combine_channels)[(images, groups)](
        stats, weight, bias, factors, pixels, channels, parts, tiles * rows, epsilon,
        WIDTH=width, PARTS=min(_PARTS, triton.next_power_of_2(parts)), SIZE=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    run(_apply)[(blocks, images)](x, factors, out, pixels, channels, ROWS=rows, COLUMNS=columns, SILU=silu, num_warps=8)
    return out
