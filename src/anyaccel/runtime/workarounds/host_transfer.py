"""Tensors of the host that meet the device's: they are taken there, which waits for nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from anyaccel.backends.torch_device import is_host, is_on
from anyaccel.runtime.workarounds.complex_pairs import make_complex_pair
from anyaccel.runtime.workarounds.scheduler_on_cpu import CpuTensors

__all__ = ["Carry", "HostTransfer", "send"]

Carry = Callable[[torch.Tensor, torch.device], torch.Tensor]
_FEW = 64


class HostTransfer:
    """Brings the arguments of one call to one place."""

    def __init__(
        self,
        device: torch.device,
        replacements: dict[torch.dtype, torch.dtype],
        *,
        clone_numbers: bool = False,
        pair_complex: bool = False,
    ) -> None:
        self.device = device
        self.kind = device.type
        self.replacements = replacements
        self.clone_numbers = clone_numbers
        self.pair_complex = pair_complex
        self.on_host = is_host(device)
        self.numbers: CpuTensors | None = None
        """The schedulers' numbers, where they stay on the host."""
        self.carry: Carry = torch.Tensor.to
        """How a tensor goes there."""

    def gather(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with the host's tensors moved if the device's are among them."""
        if self.on_host or self._find_places(args, kwargs) != (True, True):
            return args, kwargs
        return self._bring_all(args, kwargs)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function with its arguments in one place; what is made of the schedulers' numbers is one of them."""
        here, there = (False, False) if self.on_host else self._find_places(args, kwargs)
        if not here:  # as nearly always: nothing is moved, and nothing is made of numbers
            return func(*args, **kwargs)
        gathered, named = self._bring_all(args, kwargs) if there else (args, kwargs)
        result = func(*gathered, **named)
        if (
            self.numbers is not None
            and isinstance(result, torch.Tensor)
            and is_host(result.device)
            and any(isinstance(value, torch.Tensor) and self.numbers.owns(value) for value in args)
        ):
            self.numbers.add(result)
        return result

    def stays(self, tensor: torch.Tensor, target: torch.device) -> bool:
        """Whether a tensor that is asked to go to the device stays: the schedulers' numbers go when they are needed."""
        return self.numbers is not None and target.type == self.kind and self.numbers.owns(tensor)

    def _find_places(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, bool]:
        """Whether tensors of the host are among the arguments, and of the device, in lists too."""
        here = there = False
        for value in (*args, *kwargs.values()) if kwargs else args:
            for tensor in value if isinstance(value, list | tuple) else (value,):
                if isinstance(tensor, torch.Tensor):
                    if is_on(tensor.device, self.kind):
                        there = True
                    elif is_host(tensor.device):
                        here = True
        return here, there

    def _bring_all(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(self._bring(value) for value in args), {name: self._bring(value) for name, value in kwargs.items()}

    def _bring(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.bring(value) if is_host(value.device) else value
        if isinstance(value, list | tuple) and any(isinstance(item, torch.Tensor) for item in value):
            return type(value)([self._bring(item) for item in value])
        return value

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the host on the device; a single number stays, in a type and a place that the device takes."""
        if self.pair_complex and tensor.is_complex():
            return make_complex_pair(tensor, self.device)
        instead = self.replacements.get(tensor.dtype)
        if instead is not None:
            tensor = tensor.to(instead)
        if tensor.dim() == 0:
            return tensor.clone() if self.clone_numbers and tensor.storage_offset() else tensor
        return send(tensor, self.device, self.carry)


def send(tensor: torch.Tensor, device: torch.device, carry: Carry = torch.Tensor.to) -> torch.Tensor:
    """A tensor of the host on the device; one that holds a single value is filled there, which waits for nothing.

    A copy from the host's ordinary memory drains the device's queue first. A timestep of a batch is one value.
    """
    if 0 < tensor.numel() <= _FEW and not tensor.is_complex():
        first = tensor.flatten()[0]
        if tensor.numel() == 1 or not any(tensor.stride()) or bool((tensor == first).all()):
            return torch.full(tensor.shape, first.item(), dtype=tensor.dtype, device=device)
    return carry(tensor, device)
