"""Copies of weights to a device through pinned memory, in parts.

A copy from pageable memory runs on one thread, which also waits for the page faults of memory-mapped files:
https://github.com/safetensors/safetensors/issues/729. Here, all threads of torch fill a pinned buffer while the device
reads another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from anyaccel.backends.device import OpenDevice
from anyaccel.backends.device_type_checks import is_host
from anyaccel.runtime.workarounds.dtypes import parse_to_arguments
from anyaccel.runtime.workarounds.function_modes import has_foreign_modes
from anyaccel.upstream.torch_internals import skip_function_modes

__all__ = ["staging_copies"]

_BUFFER_BYTES = 2**24
# Below this size, the copy itself takes less time than filling a buffer and recording an event.
_SMALLEST_BYTES = 2**20
_KINDS = (torch.Tensor, torch.nn.Parameter)


@contextmanager
def staging_copies(opened: OpenDevice) -> Iterator[None]:
    """Copy large CPU tensors to the device through pinned memory in this block, if the device has events.

    Modes of the user must see the copies as they are, so they are left as they are in such a mode.
    """
    if not opened.driver.has_events or has_foreign_modes():
        yield
        return
    with _StagedCopies(opened):
        yield
    # As after a copy from pageable memory, any stream can use the weights.
    opened.driver.synchronize(opened.index)


class _StagedCopies(TorchFunctionMode):
    """Replaces `tensor.to(device)` for large, contiguous CPU tensors."""

    def __init__(self, opened: OpenDevice) -> None:
        super().__init__()
        self.opened = opened
        self.buffers: list[torch.Tensor] = []
        self.waits: list[Callable[[], None]] = []
        self.position = 0

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.Tensor.to or not _is_large(args[0]):
            return func(*args, **kwargs)
        device, dtype = parse_to_arguments(args[0], args[1:], kwargs)
        if is_host(device) or device.type != self.opened.torch_device.type or dtype != args[0].dtype:
            return func(*args, **kwargs)
        if "memory_format" in kwargs or device.index not in (None, self.opened.index):
            return func(*args, **kwargs)
        with skip_function_modes():
            return self._copy(args[0].detach(), self.opened.torch_device)

    def _copy(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        result = torch.empty_like(tensor, device=device)
        source, target = tensor.view(-1).view(torch.uint8), result.view(-1).view(torch.uint8)
        for start in range(0, source.numel(), _BUFFER_BYTES):
            part = source[start : start + _BUFFER_BYTES]
            buffer = self._next_buffer()[: part.numel()]
            buffer.copy_(part)
            target[start : start + _BUFFER_BYTES].copy_(buffer, non_blocking=True)
            self.waits[self.position] = self.opened.driver.record_event(self.opened.index)
            self.position = 1 - self.position
        return result

    def _next_buffer(self) -> torch.Tensor:
        """Return the buffer at the position, which the device has read."""
        if len(self.buffers) <= self.position:
            self.buffers.append(torch.empty(_BUFFER_BYTES, dtype=torch.uint8, device="cpu").pin_memory())
            self.waits.append(lambda: None)
        self.waits[self.position]()
        return self.buffers[self.position]


def _is_large(tensor: Any) -> bool:
    """Return whether a tensor is a plain, contiguous one on the CPU that is worth a staged copy."""
    return (
        type(tensor) in _KINDS
        and tensor.layout is torch.strided
        and is_host(tensor.device)
        and tensor.nbytes >= _SMALLEST_BYTES
        and tensor.is_contiguous()
        and not (tensor.requires_grad and torch.is_grad_enabled())
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_pinned()
    )
