"""Memory accounting for virtual devices: the total size in bytes of all live tensor storages."""

from __future__ import annotations

import threading
import weakref

import torch

from anyaccel.upstream.torch_internals import read_address

__all__ = ["MemoryTracker"]


class MemoryTracker:
    """Current and peak memory use in bytes for each virtual device.

    A storage that several tensors share is counted only once.
    """

    def __init__(self, count: int, capacity_bytes: int | None) -> None:
        self.capacity_bytes = capacity_bytes
        # Reentrant: garbage collection can run a storage's weakref callback while this thread holds the lock.
        self._lock = threading.RLock()
        # By address of the storage: a weak reference to it, its device index and its size in bytes.
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, int]] = {}
        self._used = [0] * count
        self._peak = [0] * count

    def add(self, tensor: torch.Tensor, index: int) -> None:
        """Count a tensor's storage on a device; raise `torch.OutOfMemoryError` if it does not fit."""
        storage = tensor.untyped_storage()
        key, size = read_address(storage), storage.nbytes()
        with self._lock:
            entry = self._alive.get(key)
            # The address of a dead storage can be reused before its callback ran.
            if entry is not None and entry[0]() is not None:
                if entry[2] != size:  # resized in place
                    growth = size - entry[2]
                    if self.capacity_bytes is not None and self._used[entry[1]] + growth > self.capacity_bytes:
                        raise self._out_of_memory(growth, entry[1])
                    self._used[entry[1]] += size - entry[2]
                    self._alive[key] = (entry[0], entry[1], size)
                    self._peak[entry[1]] = max(self._peak[entry[1]], self._used[entry[1]])
                return
            if self.capacity_bytes is not None and self._used[index] + size > self.capacity_bytes:
                raise self._out_of_memory(size, index)
            self._alive[key] = (weakref.ref(storage, lambda _: self._drop(key)), index, size)
            self._used[index] += size
            self._peak[index] = max(self._peak[index], self._used[index])

    def count_transient(self, size: int, index: int) -> None:
        """Add an operation's temporary memory to the peak; raise `torch.OutOfMemoryError` if it does not fit."""
        with self._lock:
            if self.capacity_bytes is not None and self._used[index] + size > self.capacity_bytes:
                raise self._out_of_memory(size, index)
            self._peak[index] = max(self._peak[index], self._used[index] + size)

    def used(self, index: int) -> int:
        """Return the number of bytes in use on a device."""
        return self._used[index]

    def peak(self, index: int) -> int:
        """Return the peak number of bytes in use since the last reset."""
        return self._peak[index]

    def reset_peak(self, index: int) -> None:
        """Reset the peak to the current number of bytes in use."""
        with self._lock:
            self._peak[index] = self._used[index]

    def _drop(self, key: int) -> None:
        with self._lock:
            entry = self._alive.pop(key, None)
            if entry is not None:
                self._used[entry[1]] -= entry[2]

    def _out_of_memory(self, size: int, index: int) -> torch.OutOfMemoryError:
        used, capacity = self._used[index], self.capacity_bytes or 0
        return torch.OutOfMemoryError(
            f"virtual device {index} out of memory. Tried to allocate {_format_size(size)}. It has a total capacity of "
            f"{_format_size(capacity)}, of which {_format_size(capacity - used)} is free and {_format_size(used)} is "
            "in use."
        )


def _format_size(size: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size} bytes"
