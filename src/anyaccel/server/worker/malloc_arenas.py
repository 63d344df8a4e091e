"""Host memory of a process that runs for weeks.

glibc gives each thread a heap of its own and keeps what was freed in it, so that a worker with many threads grows until
every heap has seen its largest picture. Elsewhere (macOS, musl, Windows) nothing is done.
"""

from __future__ import annotations

import contextlib
import ctypes

__all__ = ["use_one_malloc_arena"]

_ARENA_MAX = -8  # M_ARENA_MAX of malloc.h


def use_one_malloc_arena() -> None:
    """Let threads that start from now on share one heap: they wait for the device far longer than for memory."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)
