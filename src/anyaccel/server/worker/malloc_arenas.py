"""Workaround for growing host memory use in long-running worker processes.

glibc gives each thread its own malloc arena and does not return the memory freed in an arena to the
operating system. The memory use of a worker with many threads therefore grows until every arena has
held the largest image. macOS, musl and Windows are not affected.
"""

from __future__ import annotations

import contextlib
import ctypes

__all__ = ["use_one_malloc_arena"]

_M_ARENA_MAX = -8  # from malloc.h; see https://man7.org/linux/man-pages/man3/mallopt.3.html


def use_one_malloc_arena() -> None:
    """Make all threads started after this call share one glibc malloc arena."""
    # Contention does not matter: the threads wait for the device far longer than for the allocator.
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
