# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, misc, no-untyped-call"
"""Group normalization of pictures that lie in memory channels last, with the activation that follows it.

Compilers reduce over groups of channels slowly where neighbours in memory are of different groups. Here each program
reads whole pixels: one pass for the mean and the spread of every channel, a small one that joins channels to groups,
and one that applies them. In a small picture each group is done by one program. Sums are of float32 and of differences,
so that nothing cancels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["normalize_groups"]

_TILE = 8192
"""Numbers that one program holds at a time."""
_PROGRAMS = 512
"""Programs that read a batch of pictures: some for each multiprocessor."""
_PARTS = 128
"""The most parts of a small picture, so that joining them is one look."""
_SMALL = 128 * 128
_ALONE = 16 * 16
"""The most pixels of a picture whose groups are done by one program each."""


@triton.jit
def _normalize_alone(
    picture, weight, bias, result, pixels, channels, epsilon,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """One group of one picture from its first number to its last."""
    image, group = tl.program_id(0), tl.program_id(1)
    inner = tl.arange(0, SIZE)
    inside = inner < WIDTH
    column = group * WIDTH + inner
    start = image.to(tl.int64) * pixels * channels
    pivot = tl.load(picture + start + group * WIDTH).to(tl.float32)
    total = tl.zeros((ROWS, SIZE), dtype=tl.float32)
    squares = tl.zeros((ROWS, SIZE), dtype=tl.float32)
    for first in range(0, pixels, ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row < pixels)[:, None] & inside[None, :]
        values = tl.load(picture + start + row[:, None] * channels + column[None, :], mask=mask, other=0.0)
        apart = tl.where(mask, values.to(tl.float32) - pivot, 0.0)
        total += apart
        squares += apart * apart
    count = pixels * WIDTH
    away = tl.sum(tl.sum(total, axis=1), axis=0) / count
    variance = tl.maximum(tl.sum(tl.sum(squares, axis=1), axis=0) / count - away * away, 0.0)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) / tl.sqrt(variance + epsilon)
    shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32) - (pivot + away) * factor
    for first in range(0, pixels, ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row < pixels)[:, None] & inside[None, :]
        place = start + row[:, None] * channels + column[None, :]
        values = tl.load(picture + place, mask=mask, other=0.0).to(tl.float32)
        values = values * factor[None, :] + shift[None, :]
        if SILU:
            values = values / (1.0 + tl.exp(-values))
        tl.store(result + place, values.to(result.dtype.element_ty), mask=mask)


@triton.jit
def _measure_channels(
    picture, measured, pixels, channels, tiles, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """The mean of every channel over some pixels, and the sum of squared differences from it.

    Sums are of differences from the first of those pixels, and each thread adds up its own until the end.
    """
    image, part = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    inside = column < channels
    start = picture + image.to(tl.int64) * pixels * channels
    first = part * tiles * ROWS
    pivot = tl.load(start + first.to(tl.int64) * channels + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    squares = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for tile in range(tiles):
        row = first + tile * ROWS + tl.arange(0, ROWS)
        mask = (row < pixels)[:, None] & inside[None, :]
        place = start + row.to(tl.int64)[:, None] * channels + column[None, :]
        values = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        apart = tl.where(mask, values - pivot[None, :], 0.0)
        total += apart
        squares += apart * apart
    count = tl.maximum(tl.minimum(pixels - first, tiles * ROWS), 1).to(tl.float32)
    away = tl.sum(total, axis=0) / count
    spread = tl.sum(squares, axis=0) - away * away * count
    place = measured + (image * tl.num_programs(1) + part) * 2 * channels + column
    tl.store(place, pivot + away, mask=inside)
    tl.store(place + channels, tl.maximum(spread, 0.0), mask=inside)


@triton.jit
def _join_groups(
    measured, weight, bias, factors, pixels, channels, parts, rows, epsilon,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """What each channel is multiplied by and what is added, from its group's mean and spread."""
    image, group = tl.program_id(0), tl.program_id(1)
    inner = tl.arange(0, SIZE)
    inside = inner < WIDTH
    column = group * WIDTH + inner
    start = measured + image * parts * 2 * channels
    total = tl.zeros((PARTS, SIZE), dtype=tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        mask = (part < parts)[:, None] & inside[None, :]
        means = tl.load(start + part[:, None] * 2 * channels + column[None, :], mask=mask, other=0.0)
        count = tl.minimum(tl.maximum(pixels - part * rows, 0), rows).to(tl.float32)
        total += means * count[:, None]
    mean = tl.sum(tl.sum(total, axis=1), axis=0) / (pixels * WIDTH)
    total = tl.zeros((PARTS, SIZE), dtype=tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        mask = (part < parts)[:, None] & inside[None, :]
        place = start + part[:, None] * 2 * channels + column[None, :]
        means = tl.load(place, mask=mask, other=0.0)
        spreads = tl.load(place + channels, mask=mask, other=0.0)
        count = tl.minimum(tl.maximum(pixels - part * rows, 0), rows).to(tl.float32)
        apart = tl.where(mask, means - mean, 0.0)
        total += spreads + apart * apart * count[:, None]
    variance = tl.sum(tl.sum(total, axis=1), axis=0) / (pixels * WIDTH)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) / tl.sqrt(variance + epsilon)
    shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32) - mean * factor
    tl.store(factors + image * 2 * channels + column, factor, mask=inside)
    tl.store(factors + image * 2 * channels + channels + column, shift, mask=inside)


@triton.jit
def _apply(
    picture, factors, result, pixels, channels, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SILU: tl.constexpr
):  # fmt: skip
    """Each number times its channel's factor, plus its channel's shift, and the activation of that."""
    image = tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    inside = column < channels
    factor = tl.load(factors + image * 2 * channels + column, mask=inside, other=0.0)
    shift = tl.load(factors + image * 2 * channels + channels + column, mask=inside, other=0.0)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = (row < pixels)[:, None] & inside[None, :]
    place = image.to(tl.int64) * pixels * channels + row.to(tl.int64)[:, None] * channels + column[None, :]
    values = tl.load(picture + place, mask=mask, other=0.0).to(tl.float32)
    values = values * factor[None, :] + shift[None, :]
    if SILU:
        values = values / (1.0 + tl.exp(-values))
    tl.store(result + place, values.to(result.dtype.element_ty), mask=mask)


@torch.library.triton_op("anyaccel::normalize_groups", mutates_args={})
def normalize_groups(
    picture: torch.Tensor, groups: int, weight: torch.Tensor, bias: torch.Tensor, epsilon: float, silu: bool
) -> torch.Tensor:
    """`group_norm` of a picture (images, channels, height, width), and `silu` of it where that is asked for."""
    picture = picture.contiguous(memory_format=torch.channels_last)
    images, channels = picture.shape[0], picture.shape[1]
    pixels = picture.shape[2] * picture.shape[3]
    width = channels // groups
    result = torch.empty_like(picture)
    run = torch.library.wrap_triton
    if pixels <= _ALONE:
        size = triton.next_power_of_2(width)
        rows = min(_TILE // size, triton.next_power_of_2(pixels))
        run(_normalize_alone)[(images, groups)](
            picture, weight, bias, result, pixels, channels, epsilon,
            WIDTH=width, SIZE=size, ROWS=rows, SILU=silu, num_warps=max(1, min(16, rows * size // 256)),
        )  # fmt: skip
        return result
    columns = triton.next_power_of_2(channels)
    rows = max(1, _TILE // columns)
    blocks = triton.cdiv(pixels, rows)
    tiles = triton.cdiv(blocks, max(1, min(_PARTS if pixels <= _SMALL else _PROGRAMS, _PROGRAMS // images)))
    parts = triton.cdiv(blocks, tiles)
    measured = torch.empty((images, parts, 2, channels), device=picture.device, dtype=torch.float32)
    factors = torch.empty((images, 2, channels), device=picture.device, dtype=torch.float32)
    run(_measure_channels)[(images, parts)](
        picture, measured, pixels, channels, tiles, ROWS=rows, COLUMNS=columns, num_warps=8
    )
    run(_join_groups)[(images, groups)](
        measured, weight, bias, factors, pixels, channels, parts, tiles * rows, epsilon,
        WIDTH=width, PARTS=min(_PARTS, triton.next_power_of_2(parts)), SIZE=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    run(_apply)[(blocks, images)](
        picture, factors, result, pixels, channels, ROWS=rows, COLUMNS=columns, SILU=silu, num_warps=8
    )
    return result
