"""The memory of the virtual devices: what is alive is counted by storage, exactly."""

from __future__ import annotations

import threading
import weakref

import torch

from anyaccel.upstream.torch_internals import read_address

__all__ = ["MemoryTracker"]


class MemoryTracker:
    """Bytes alive and at the peak of each device; views share a storage and count once."""

    def __init__(self, count: int, capacity_bytes: int | None) -> None:
        self.capacity_bytes = capacity_bytes
        self._lock = threading.RLock()  # a storage may die, and call back, while the lock is held
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, int]] = {}
        self._used = [0] * count
        self._peak = [0] * count

    def add(self, tensor: torch.Tensor, index: int) -> None:
        """Count a tensor's storage on a device; past the capacity torch's own error is raised."""
        storage = tensor.untyped_storage()
        key, size = read_address(storage), storage.nbytes()
        with self._lock:
            known = self._alive.get(key)
            if known is not None and known[0]() is not None:
                if known[2] != size:  # resized in place
                    grown = size - known[2]
                    if self.capacity_bytes is not None and self._used[known[1]] + grown > self.capacity_bytes:
                        raise self._out_of_memory(grown, known[1])
                    self._used[known[1]] += size - known[2]
                    self._alive[key] = (known[0], known[1], size)
                    self._peak[known[1]] = max(self._peak[known[1]], self._used[known[1]])
                return
            if self.capacity_bytes is not None and self._used[index] + size > self.capacity_bytes:
                raise self._out_of_memory(size, index)
            self._alive[key] = (weakref.ref(storage, lambda _: self._drop(key)), index, size)
            self._used[index] += size
            self._peak[index] = max(self._peak[index], self._used[index])

    def pass_by(self, size: int, index: int) -> None:
        """Count what an operation holds only while it runs."""
        with self._lock:
            if self.capacity_bytes is not None and self._used[index] + size > self.capacity_bytes:
                raise self._out_of_memory(size, index)
            self._peak[index] = max(self._peak[index], self._used[index] + size)

    def used(self, index: int) -> int:
        """Bytes alive on a device."""
        return self._used[index]

    def peak(self, index: int) -> int:
        """The most bytes alive at once since the last reset."""
        return self._peak[index]

    def reset_peak(self, index: int) -> None:
        """Start counting the peak anew."""
        with self._lock:
            self._peak[index] = self._used[index]

    def _drop(self, key: int) -> None:
        with self._lock:
            known = self._alive.pop(key, None)
            if known is not None:
                self._used[known[1]] -= known[2]

    def _out_of_memory(self, size: int, index: int) -> torch.OutOfMemoryError:
        used, capacity = self._used[index], self.capacity_bytes or 0
        return torch.OutOfMemoryError(
            f"virtual device {index} out of memory. Tried to allocate {_in_units(size)}. It has a total capacity of "
            f"{_in_units(capacity)}, of which {_in_units(capacity - used)} is free and {_in_units(used)} is in use."
        )


def _in_units(size: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size} bytes"
