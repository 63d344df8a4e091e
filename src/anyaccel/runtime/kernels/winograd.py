"""Convolutions of 3 × 3 by Winograd's algorithm, out of torch's own matrix products.

A tile of the picture and the filter are transformed, multiplied number by number, and transformed back: for tiles of
2 × 2 that takes 4 products where a convolution takes 9, for 4 × 4 it takes 2.25. On a host whose convolutions are no
faster than its matrix products, that is what it saves. Pictures lie in memory channels last, so that tiles are gathered
in long rows. (A. Lavin and S. Gray, "Fast Algorithms for Convolutional Neural
Networks", 2016, has the matrices.)
"""

from __future__ import annotations

import functools
import mmap
from contextlib import suppress

import torch
from torch.nn import functional

__all__ = ["choose_tile", "convolve", "transform_filters"]

_MANY_PIXELS = 512
_MANY_PRODUCTS = 15_000
_FEW_CHANNELS = 48
_STRIP, _MOST_STRIP = 2**20, 16 * 2**20
"""The numbers of a large picture that are worked on at once: few enough for the processor's cache, more where filters
are larger than that, which are read for every strip, and no more than bounds the memory."""


def choose_tile(shape: torch.Size, weight: torch.Size) -> int:
    """The side of the tiles for a picture and a filter; 0 where a plain convolution is faster.

    By the shapes alone, so that one call gives one picture on every machine: large tiles where there are many of them,
    small ones where filters are large enough to make up for the transforms.
    """
    images, channels, height, width = shape
    if min(channels, weight[0]) < _FEW_CHANNELS:
        return 0
    if images * height * width >= _MANY_PIXELS and not height % 4 and not width % 4:
        return 4
    return 2 if weight[0] * channels >= _MANY_PRODUCTS and not height % 2 and not width % 2 else 0


@functools.cache
def _matrices(tile: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What transforms tiles of the picture, filters, and tiles of the result, each as one matrix for both sides."""
    if tile == 2:
        picture = [[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]]
        filters = [[1, 0, 0], [1 / 2, 1 / 2, 1 / 2], [1 / 2, -1 / 2, 1 / 2], [0, 0, 1]]
        result = [[1, 1, 1, 0], [0, 1, -1, -1]]
    else:
        picture = [
            [4, 0, -5, 0, 1, 0], [0, -4, -4, 1, 1, 0], [0, 4, -4, -1, 1, 0],
            [0, -2, -1, 2, 1, 0], [0, 2, -1, -2, 1, 0], [0, 4, 0, -5, 0, 1],
        ]  # fmt: skip
        filters = [
            [1 / 4, 0, 0], [-1 / 6, -1 / 6, -1 / 6], [-1 / 6, 1 / 6, -1 / 6],
            [1 / 24, 1 / 12, 1 / 6], [1 / 24, -1 / 12, 1 / 6], [0, 0, 1],
        ]  # fmt: skip
        result = [[1, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0], [0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 1]]
    both = [torch.tensor(rows, dtype=torch.float64) for rows in (picture, filters, result)]
    made = [torch.kron(rows, rows).to(torch.float32) for rows in both]
    return made[0], made[1], made[2]


def transform_filters(weight: torch.Tensor, tile: int) -> torch.Tensor:
    """Filters (out, in, 3, 3) as one matrix (in, out) for each number of a tile."""
    out, channels = weight.shape[:2]
    flat = weight.detach().permute(2, 3, 1, 0).reshape(9, channels * out)
    made = _make_room((tile + 2) ** 2, channels * out)
    return torch.mm(_matrices(tile)[1], flat, out=made).view(-1, channels, out)


def _make_room(rows: int, columns: int) -> torch.Tensor:
    """Memory in large pages where the system has them: to be given it takes half of the time."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(rows, columns)
    room = mmap.mmap(-1, 4 * rows * columns)
    with suppress(OSError):  # a system that was built without them
        room.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(room, dtype=torch.float32).view(rows, columns)


def convolve(picture: torch.Tensor, filters: torch.Tensor, bias: torch.Tensor | None, tile: int) -> torch.Tensor:
    """`conv2d` with a margin of 1, by filters that were transformed; the result lies channels last."""
    images, channels, height, width = picture.shape
    side, down, across, out = tile + 2, height // tile, width // tile, filters.shape[2]
    of_picture, _, of_result = _matrices(tile)
    padded = functional.pad(picture.permute(0, 2, 3, 1), (0, 0, 1, 1, 1, 1))
    tiles = padded.unfold(1, side, tile).unfold(2, side, tile).permute(4, 5, 0, 1, 2, 3)
    result = picture.new_empty(images, height, width, out)
    numbers_at_once = min(_MOST_STRIP, max(_STRIP, 2 * filters.numel()))
    strip = max(1, numbers_at_once // (side * side * images * across * max(channels, out)))
    for top in range(0, down, strip):
        numbers = (tiles[:, :, :, top : top + strip] if strip < down else tiles).reshape(side * side, -1)
        products = torch.bmm((of_picture @ numbers).view(side * side, -1, channels), filters)
        made = (of_result @ products.view(side * side, -1)).view(tile, tile, images, -1, across, out)
        rows = result[:, top * tile : (top + strip) * tile] if strip < down else result
        place = rows.view(images, -1, tile, across, tile, out)
        torch.add(made.permute(2, 3, 0, 4, 1, 5), 0.0 if bias is None else bias, out=place)
    return result.permute(0, 3, 1, 2)
