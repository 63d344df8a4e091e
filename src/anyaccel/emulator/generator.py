"""Generators of a virtual device: CPU generators that say where they belong."""

from __future__ import annotations

from typing import Any

import torch

from anyaccel.emulator.accelerator import VirtualAccelerator

__all__ = ["install_generator"]

_CpuGenerator = torch._C.Generator


class VirtualGenerator(_CpuGenerator):
    """A generator on a virtual device."""

    _virtual_device: torch.device

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The virtual device."""
        return self._virtual_device


def install_generator(accelerator: VirtualAccelerator) -> None:
    """Let `torch.Generator("hpu")` give a generator of the virtual device; every other call is as before."""

    class _AnyGenerator(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, _CpuGenerator)

        def __subclasscheck__(cls, kind: type) -> bool:
            return issubclass(kind, _CpuGenerator)

        def __call__(cls, device: Any = "cpu") -> Any:
            place = torch.device(device)
            if place.type != accelerator.name:
                return _CpuGenerator(place)
            if accelerator.enforcing and accelerator.limits.random is not None:
                accelerator.meet("random_numbers", accelerator.limits.random, "torch.Generator")
            generator = VirtualGenerator()
            generator._virtual_device = place if place.index is not None else accelerator.device()
            return generator

    class Generator(metaclass=_AnyGenerator):
        """torch.Generator, and the virtual device's."""

    vars(torch)["Generator"] = Generator
