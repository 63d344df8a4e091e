"""What operations of a device hold while they run beside their tensors, and how its memory is handed out."""

from __future__ import annotations

import math
from dataclasses import dataclass

from anyaccel.backends.claim import Yes
from anyaccel.backends.quirks import CONVOLUTIONS_REORDER
from anyaccel.backends.sheet import MemoryTerms, Sheet

__all__ = ["Workspace", "read_workspace"]

_NUMBERS = 8192
"""Timesteps, scales and other single numbers that come and go."""
_CHANNELS = 8
"""Kernels for half precision take channels in eights."""
_WIDEST_HEAD = 256
"""Past this many numbers to a head, fused attention sums up in float32 beside its result."""
_LARGE, _REST = 10 * 2**20, 2**20
"""A tensor of this size gets a segment of its own, whose rest goes with it where it is no larger than the second."""

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """The habits of one device that decide how much memory an operation needs."""

    fused_attention: bool = True
    """Whether the scores of attention are never held whole."""
    reordered_convolutions: bool = False
    """Whether a convolution copies what goes in and comes out to channels last, unless it is in that order already."""
    block_bytes: int = 512
    """Every tensor takes whole blocks of this size."""
    segment_bytes: int = 0
    """Large tensors get whole segments of this size; 0 where they get what they need."""
    fixed_bytes: int = _NUMBERS
    """What libraries and loose numbers take besides."""

    def of_block(self, size: int) -> int:
        """What a tensor of that size takes."""
        whole = -(-size // self.block_bytes) * self.block_bytes
        if not self.segment_bytes or whole < _LARGE:
            return whole
        rest = -whole % self.segment_bytes
        return whole + rest if rest <= _REST else whole

    def of_convolution(self, given: Shape, weight: Shape, made: Shape, element_bytes: int, channels_last: bool) -> int:
        """For one convolution, by its shapes."""
        if not self.reordered_convolutions or len(given) < 4 or math.prod(weight[2:]) == 1:
            return 0
        kernel = math.prod(weight) * element_bytes
        if channels_last:
            return kernel
        return kernel + sum(_in_eights(shape) for shape in (given, made)) * element_bytes

    def of_attention(self, query: Shape, key: Shape, width: int, *, plain_mask: bool = True) -> int:
        """For one call of attention, by its shapes: a sum for each row where it is fused, all scores twice where not.

        A mask that does not lie in memory row by row makes fused kernels step back.
        """
        rows = math.prod(query[:-1])
        if self.fused_attention and plain_mask:
            return rows * 4 * (width if width > _WIDEST_HEAD else 1)
        return 2 * rows * key[-2] * 4


def _in_eights(shape: Shape) -> int:
    return math.prod(shape) // shape[1] * -(-shape[1] // _CHANNELS) * _CHANNELS


def read_workspace(sheet: Sheet, *, virtual: bool = False) -> Workspace:
    """The habits that a sheet tells of; attention counts as not fused where nothing is known.

    A virtual device hands out memory to the byte.
    """
    terms = sheet.memory if isinstance(sheet.memory, MemoryTerms) else None
    return Workspace(
        fused_attention=isinstance(sheet.fused_attention, Yes),
        reordered_convolutions=sheet.has_quirk(CONVOLUTIONS_REORDER),
        block_bytes=1 if virtual else 512,
        segment_bytes=terms.segment_bytes if terms else 0,
        fixed_bytes=_NUMBERS + (terms.fixed_bytes if terms else 0),
    )
