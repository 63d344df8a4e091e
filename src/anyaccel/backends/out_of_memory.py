"""Telling that a device ran out of memory, in whatever words its software says so."""

from __future__ import annotations

import re

__all__ = ["is_out_of_memory"]

_WORDS = re.compile(
    r"out of (device |host )?memory"
    r"|OutOfMemory"
    r"|OUT_OF_(DEVICE|HOST)_MEMORY|OUT_OF_RESOURCES|RESOURCE_EXHAUSTED"
    r"|fail\w* to alloc\w*( \w+)? memory"
    r"|(can't|cannot|could not) allocate memory|not enough memory: you tried to allocate"  # torch's CPU allocator
    r"|Invalid buffer size",  # Metal, for a buffer that is larger than any may be
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the device has no memory left; vendors' own errors are known by their words."""
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _WORDS.search(str(error)) is not None
