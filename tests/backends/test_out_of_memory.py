"""Detection of out-of-memory errors by class and by the messages of all vendors."""

from __future__ import annotations

import pytest
import torch

from anyaccel.backends.out_of_memory import is_out_of_memory

MESSAGES = [
    "CUDA out of memory. Tried to allocate 2.00 GiB",
    "MPS backend out of memory (MPS allocated: 18.00 GB)",
    "Invalid buffer size: 40.00 GiB",
    "UR error: UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",
    "XPU out of memory",
    "RESOURCE_EXHAUSTED: Attempting to allocate 12.0G",
    "Failed to allocate device memory",
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 1",
    "DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes.",
    "unable to mmap 16 bytes from file </x>: Cannot allocate memory (12)",
]


@pytest.mark.parametrize("message", MESSAGES)
def test_vendor_messages_are_detected(message: str) -> None:
    assert is_out_of_memory(RuntimeError(message))
    assert not is_out_of_memory(ValueError(message)), "an error about an argument may quote anything"


def test_error_classes() -> None:
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("anything"))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
