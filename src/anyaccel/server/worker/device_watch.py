"""Detection of device calls that hang.

A thread that uses the device cannot report that it hangs, and a separate thread that sends heartbeats only shows that
the process is alive. The watch therefore looks at the threads that use the device: as long as one of them executes
Python code between two looks, it has not been inside a single call to the driver.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeAlias

import psutil

__all__ = ["DeviceWatch"]

# Position of a thread: code object and last instruction of each of its frames.
_Position: TypeAlias = tuple[tuple[int, int], ...]
# A compiler that runs in a child process uses this much CPU time within seconds. Idle child processes take hours.
_CHILD_CPU_S = 1.0


class DeviceWatch:
    """Watch that measures how long no thread that uses the device has made progress.

    Known limitations: a compiler that runs inside the process for a long time within one call looks like a call that
    hangs, and an endless loop in Python code looks like progress unless it is always found at the same position.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._positions: dict[int, _Position] = {}
        """Last seen position of each thread that uses the device, by thread id."""
        self._process = psutil.Process()
        self._child_cpu_s, self._io_bytes = 0.0, 0
        self._moved_at = time.monotonic()

    @contextmanager
    def using_device(self) -> Iterator[None]:
        """Watch the current thread inside the `with` block.

        Code that waits for another thread with a timeout must not run inside the block: its loop looks like progress.
        """
        thread_id = threading.get_ident()
        with self._lock:
            is_outermost = thread_id not in self._positions
            self._positions.setdefault(thread_id, ())
            self._moved_at = time.monotonic()
        try:
            yield
        finally:
            if is_outermost:
                with self._lock:
                    del self._positions[thread_id]
                    self._moved_at = time.monotonic()

    def measure_stall_s(self) -> float:
        """Return the seconds without progress of the threads that use the device; 0 if no thread uses it.

        Call this every few seconds: progress is found by a comparison with the previous call.
        """
        with self._lock:
            if not self._positions or self._has_moved() or self._has_io() or self._has_busy_children():
                self._moved_at = time.monotonic()
                return 0.0
            return time.monotonic() - self._moved_at

    def _has_moved(self) -> bool:
        frames = sys._current_frames()
        positions = {thread_id: _find_position(frames.get(thread_id)) for thread_id in self._positions}
        moved = positions != self._positions
        self._positions.update(positions)
        return moved

    def _has_io(self) -> bool:
        """Return whether the process read or wrote files.

        Weights are read and downloaded in loops that may always be found at the same position.
        """
        try:
            counters = self._process.io_counters()
        except (psutil.Error, AttributeError, OSError):  # not available on macOS and in some containers
            return False
        previous, self._io_bytes = self._io_bytes, counters.read_bytes + counters.write_bytes
        return self._io_bytes > previous

    def _has_busy_children(self) -> bool:
        """Return whether child processes, such as compilers, used the CPU."""
        total_s = 0.0
        for child in self._process.children(recursive=True):
            try:
                times = child.cpu_times()
            except psutil.Error:  # it has exited
                continue
            total_s += times.user + times.system
        # The total is lower if a child has exited, which is also progress.
        is_busy = abs(total_s - self._child_cpu_s) > _CHILD_CPU_S
        if is_busy:
            self._child_cpu_s = total_s
        return is_busy


def _find_position(frame: FrameType | None) -> _Position:
    position = []
    while frame is not None:
        position.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return tuple(position)
