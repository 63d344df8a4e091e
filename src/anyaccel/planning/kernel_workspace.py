"""Estimates of the workspace memory for a device's kernels, and of its allocator's rounding.

The constants were fitted to measurements on one H200 (benchmarks/results/memory_cuda.json).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from anyaccel.backends.claim import Yes
from anyaccel.backends.quirks import CONVOLUTIONS_REORDER
from anyaccel.backends.sheet import MemoryTerms, Sheet

__all__ = ["Workspace", "read_workspace"]

# Bytes for timesteps, scales and other short-lived scalars.
_SCALARS_BYTES = 8192
# Half-precision convolution kernels pad channels to a multiple of this.
_CHANNELS = 8
# Fused attention accumulates heads wider than this in an extra float32 buffer.
_WIDEST_HEAD = 256
# torch's caching allocator: tensors from 10 MiB on get their own segments, remainders up to 1 MiB are not reused.
_LARGE, _REMAINDER = 10 * 2**20, 2**20

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Memory that a device's kernels need in addition to their input and output tensors."""

    fused_attention: bool = True
    """Whether attention never materializes all scores."""
    reordered_convolutions: bool = False
    """Whether a convolution copies its input and output to channels last, unless they already are."""
    block_bytes: int = 512
    """The allocator rounds every tensor up to a multiple of this."""
    segment_bytes: int = 0
    """The segment size of large tensors; 0 if the allocator does not use segments."""
    fixed_bytes: int = _SCALARS_BYTES
    """Bytes held by libraries and scalars."""

    def round_up_bytes(self, size: int) -> int:
        """Return the number of bytes that the allocator reserves for a tensor of `size` bytes."""
        rounded = -(-size // self.block_bytes) * self.block_bytes
        if not self.segment_bytes or rounded < _LARGE:
            return rounded
        # The caching allocator splits a block only if the remainder is large enough to be useful.
        remainder = -rounded % self.segment_bytes
        return rounded + remainder if remainder <= _REMAINDER else rounded

    def convolution_bytes(
        self, input_shape: Shape, weight: Shape, output_shape: Shape, element_bytes: int, channels_last: bool
    ) -> int:
        """Return the workspace size in bytes for one convolution with these shapes."""
        # A 1x1 convolution is a matrix product and is not reordered.
        if not self.reordered_convolutions or len(input_shape) < 4 or math.prod(weight[2:]) == 1:
            return 0
        kernel = math.prod(weight) * element_bytes
        if channels_last:
            return kernel
        return kernel + sum(_count_padded(shape) for shape in (input_shape, output_shape)) * element_bytes

    def attention_bytes(self, query: Shape, key: Shape, width: int, *, plain_mask: bool = True) -> int:
        """Return the workspace size in bytes for one attention call.

        Fused attention needs one float32 value per query row, or `width` values if the heads are wider
        than 256. Unfused attention stores all scores twice in float32. It is used if the device has no
        fused kernel, or if `plain_mask` is False: the mask is not contiguous in its last dimension.
        """
        rows = math.prod(query[:-1])
        if self.fused_attention and plain_mask:
            return rows * 4 * (width if width > _WIDEST_HEAD else 1)
        return 2 * rows * key[-2] * 4


def _count_padded(shape: Shape) -> int:
    """Count the elements of a tensor after its channels are padded to a multiple of 8.

    Half-precision convolution kernels pad their inputs and outputs in this way.
    """
    return math.prod(shape) // shape[1] * -(-shape[1] // _CHANNELS) * _CHANNELS


def read_workspace(sheet: Sheet, *, virtual: bool = False) -> Workspace:
    """Return the kernel workspace parameters for a device, based on its sheet.

    Attention counts as unfused unless the sheet lists it as fused. With `virtual`, tensor sizes are
    not rounded up to blocks of 512 bytes.
    """
    terms = sheet.memory if isinstance(sheet.memory, MemoryTerms) else None
    return Workspace(
        fused_attention=isinstance(sheet.fused_attention, Yes),
        reordered_convolutions=sheet.has_quirk(CONVOLUTIONS_REORDER),
        block_bytes=1 if virtual else 512,  # a virtual device counts exact bytes; 512 is torch's kMinBlockSize
        segment_bytes=terms.segment_bytes if terms else 0,
        fixed_bytes=_SCALARS_BYTES + (terms.fixed_bytes if terms else 0),
    )
