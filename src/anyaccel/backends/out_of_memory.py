"""Detection of out-of-memory errors raised by any vendor's software."""

from __future__ import annotations

import re

__all__ = ["is_out_of_memory"]

_MESSAGES = re.compile(
    r"out of (device |host )?memory"
    r"|OutOfMemory"
    r"|OUT_OF_(DEVICE|HOST)_MEMORY|OUT_OF_RESOURCES|RESOURCE_EXHAUSTED"
    r"|fail\w* to alloc\w*( \w+)? memory"
    r"|(can't|cannot|could not) allocate memory|not enough memory: you tried to allocate"  # torch's CPU allocator
    r"|Invalid buffer size",  # Metal, for a buffer above its maximum size
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that the device is out of memory."""
    import torch

    # Not every vendor raises torch.OutOfMemoryError: some raise a RuntimeError with their own message.
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _MESSAGES.search(str(error)) is not None
