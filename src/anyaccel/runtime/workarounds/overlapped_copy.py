"""The ferry: tensors go between host and device without waiting for what other calls asked of the device.

A copy to or from the host's ordinary memory waits until the device has done all that it was asked for before, and while
it waits no other thread can ask for anything: one call that fetches its picture would stop all that are under way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from anyaccel.backends.device import OpenDevice
from anyaccel.backends.torch_device import is_host, is_on
from anyaccel.runtime.placement_state import Placement
from anyaccel.runtime.workarounds.dtypes import read_target

__all__ = ["OverlappedCopy", "find_overlapped_copy"]

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
_Read = TypeVar("_Read")
_MOVES = (torch.Tensor.to, torch.Tensor.type_as, torch.Tensor.cpu)


def find_overlapped_copy(placement: Placement) -> OverlappedCopy | None:
    """The ferry of a device that several calls have at once; None where there is one call, or nothing to wait for."""
    return OverlappedCopy(placement.opened) if placement.shared and placement.opened.driver.marks else None


class OverlappedCopy:
    """Between the host and one device."""

    def __init__(self, opened: OpenDevice) -> None:
        self.driver, self.index, self.kind = opened.driver, opened.index, opened.torch_device.type

    def mark(self) -> Callable[[], None]:
        """What waits until the device has done what it was asked for up to now."""
        return self.driver.record_event(self.index)

    def send(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A tensor of the host on the device."""
        return self.driver.send(tensor, device)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the device on the host."""
        return self.read(self.mark(), tensor.cpu)

    def read(self, done: Callable[[], None], read: Callable[[], _Read]) -> _Read:
        """What is read from the device once something is done there, whatever else it was asked for since."""
        done()
        with self.driver.side_stream(self.index):
            return read()

    def make_handlers(self, handlers: dict[Any, Handler]) -> dict[Any, Handler]:
        """Handlers for what moves a tensor, in front of those that are there."""
        return {func: self._carry_by(handlers.get(func)) for func in _MOVES}

    def _carry_by(self, behind: Handler | None) -> Handler:
        def carry(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            tensor, rest = args[0], args[1:]
            place, dtype = (
                (torch.device("cpu"), tensor.dtype) if func is torch.Tensor.cpu else read_target(tensor, rest, kwargs)
            )
            plain = type(tensor) is torch.Tensor and not tensor.requires_grad
            if plain and is_on(tensor.device, self.kind) and is_host(place):
                return func(self.fetch(tensor), *rest, **kwargs)
            if plain and is_host(tensor.device) and is_on(place, self.kind) and "memory_format" not in kwargs:
                return self.send(tensor.to(dtype), place)
            return func(*args, **kwargs) if behind is None else behind(func, args, kwargs)

        return carry
