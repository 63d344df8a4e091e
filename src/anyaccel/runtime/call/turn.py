"""Turns of threads that use the same pipeline: a pipeline has one scheduler, so it runs one call at a time."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from anyaccel.errors import UsageError
from anyaccel.runtime.placement_state import Placement

__all__ = ["waiting_for_turn"]

_POLL_S = 0.5
# A callback that waits this long for another thread, while that thread waits for the pipeline, does not continue.
_BLOCKED_S = 5.0
_LIBRARIES = ("anyaccel", "torch", "diffusers", "transformers", "accelerate")


@contextmanager
def waiting_for_turn(pipe: Any, placement: Placement) -> Iterator[None]:
    """Wait until no other thread uses the pipeline, and let other threads wait inside the `with` block.

    Raise `UsageError` if the other thread is blocked in a callback. It usually waits for this thread then:
    a callback has started a thread that calls the same pipeline.
    """
    blocked_s, before = 0.0, None
    while not placement.lock.acquire(timeout=_POLL_S):
        frame = _find_blocked_frame(placement.thread)
        blocked_s = blocked_s + _POLL_S if frame is not None and frame is before else 0.0
        before = frame
        if blocked_s >= _BLOCKED_S:
            del frame, before  # the traceback of the error must not keep the variables of the other thread
            raise UsageError(
                f"{type(pipe).__name__} is running in another thread, in which a callback waits for a thread",
                hint="call the pipeline in the thread of the callback, or do not wait for the result in the callback",
            )
    frame = before = None
    outer, placement.thread = placement.thread, threading.get_ident()
    try:
        yield
    finally:
        placement.thread = outer
        placement.lock.release()


def _find_blocked_frame(thread: int | None) -> FrameType | None:
    """Return the frame in which code of the user waits for another thread, or None if it does not wait."""
    innermost = sys._current_frames().get(thread) if thread is not None else None
    if innermost is None or _read_library(innermost) != "threading":  # joins, queues, events and futures wait there
        return None
    frame: FrameType | None = innermost
    while frame is not None and _read_library(frame) in sys.stdlib_module_names:
        frame = frame.f_back
    # Libraries wait for threads of their own, which make progress.
    if frame is None or _read_library(frame) in _LIBRARIES:
        return None
    return innermost


def _read_library(frame: FrameType) -> str:
    """Return the top-level package of the code of a frame."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
