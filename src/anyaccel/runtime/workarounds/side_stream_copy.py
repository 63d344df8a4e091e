"""Copies between the CPU and a device that do not wait for other calls' work on that device.

A copy from or to pageable host memory blocks until the device has finished all enqueued work.
Meanwhile, no other thread can enqueue work, so one call that reads its image would stall all
concurrent calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from anyaccel.backends.device import OpenDevice
from anyaccel.backends.device_type_checks import is_host, is_on
from anyaccel.runtime.placement_state import Placement
from anyaccel.runtime.workarounds.dtypes import parse_to_arguments

__all__ = ["SideStreamCopy", "find_side_stream_copy"]

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
_Result = TypeVar("_Result")
_MOVE_FUNCTIONS = (torch.Tensor.to, torch.Tensor.type_as, torch.Tensor.cpu)


def find_side_stream_copy(placement: Placement) -> SideStreamCopy | None:
    """Return an `SideStreamCopy` if several calls share a device that supports events, otherwise None."""
    return SideStreamCopy(placement.opened) if placement.shared and placement.opened.driver.has_events else None


class SideStreamCopy:
    """Copies between the CPU and one device that do not wait for the work of concurrent calls."""

    def __init__(self, opened: OpenDevice) -> None:
        self.driver, self.index, self.device_type = opened.driver, opened.index, opened.torch_device.type

    def record_event(self) -> Callable[[], None]:
        """Record an event after all work enqueued so far; return a function that waits for the event."""
        return self.driver.record_event(self.index)

    def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Copy a CPU tensor to the device without waiting for enqueued work."""
        # Through pinned memory: a copy from pageable memory would synchronize with the stream
        # (https://docs.nvidia.com/cuda/cuda-runtime-api/api-sync-behavior.html).
        return self.driver.send(tensor, device)

    def to_cpu(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a device tensor to the CPU, waiting only for work enqueued before the copy."""
        return self.read_after(self.record_event(), tensor.cpu)

    def read_after(self, wait: Callable[[], None], read: Callable[[], _Result]) -> _Result:
        """Wait for an event, then call `read` without waiting for work enqueued after the event."""
        wait()
        # On the side stream: on the default stream the read would queue behind the work of other calls.
        with self.driver.side_stream(self.index):
            return read()

    def make_handlers(self, handlers: dict[Any, Handler]) -> dict[Any, Handler]:
        """Return handlers for `to`, `type_as` and `cpu` that overlap copies with the work of other calls.

        Moves that cannot be overlapped use the existing handlers.
        """
        return {func: self._wrap_handler(handlers.get(func)) for func in _MOVE_FUNCTIONS}

    def _wrap_handler(self, inner: Handler | None) -> Handler:
        def move(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            tensor, others = args[0], args[1:]
            target, dtype = (
                (torch.device("cpu"), tensor.dtype)
                if func is torch.Tensor.cpu
                else parse_to_arguments(tensor, others, kwargs)
            )
            # Subclasses have their own copy semantics, and autograd must see the original copy.
            is_plain = type(tensor) is torch.Tensor and not tensor.requires_grad
            if is_plain and is_on(tensor.device, self.device_type) and is_host(target):
                return func(self.to_cpu(tensor), *others, **kwargs)
            if (
                is_plain
                and is_host(tensor.device)
                and is_on(target, self.device_type)
                and "memory_format" not in kwargs
            ):
                return self.to_device(tensor.to(dtype), target)
            return func(*args, **kwargs) if inner is None else inner(func, args, kwargs)

        return move
