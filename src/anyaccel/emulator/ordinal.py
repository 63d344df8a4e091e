"""`torch.device(0)`: a number alone means the accelerator, and C++ would look for one that it was built for."""

from __future__ import annotations

import copyreg
from typing import Any

import torch

from anyaccel.emulator.accelerator import VirtualAccelerator

__all__ = ["install_ordinal_devices"]

_Device = torch.device


def _make_device(text: str) -> torch.device:
    return _Device(text)


def install_ordinal_devices(accelerator: VirtualAccelerator) -> None:
    """Let `torch.device(0)` be the virtual device's; every other call gives what it gave before."""

    class _AnyDevice(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, _Device)

        def __subclasscheck__(cls, kind: type) -> bool:
            return issubclass(kind, _Device)

        def __eq__(cls, other: object) -> bool:
            return other is cls or other is _Device

        def __hash__(cls) -> int:
            return hash(_Device)

        def __call__(cls, *args: Any, **kwargs: Any) -> torch.device:
            if len(args) == 1 and type(args[0]) is int and not kwargs:
                return _Device(accelerator.name, args[0])
            return _Device(*args, **kwargs)

    class device(metaclass=_AnyDevice):  # noqa: N801 - it stands for torch.device
        """torch.device, where a number alone means the virtual accelerator."""

    vars(torch)["device"] = device
    # pickle finds a class by its name, which now leads to another one.
    copyreg.pickle(_Device, lambda place: (_make_device, (str(place),)))
