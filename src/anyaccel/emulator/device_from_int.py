"""Support for `torch.device(0)` on virtual devices.

Torch's C++ code accepts an index without a device type only for accelerators that it was built for.
"""

from __future__ import annotations

from typing import Any

import torch

from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.torch_patch_registry import apply_patch, replace_class

__all__ = ["install_ordinal_devices"]


def install_ordinal_devices(accelerator: VirtualAccelerator) -> None:
    """Make `torch.device(index)` return a virtual device; leave other calls unchanged."""

    def replace(original: Any) -> Any:
        def build(*args: Any, **kwargs: Any) -> torch.device:
            # Not isinstance, because torch rejects torch.device(True).
            if len(args) == 1 and type(args[0]) is int and not kwargs:
                return original(accelerator.name, args[0])  # type: ignore[no-any-return]
            return original(*args, **kwargs)  # type: ignore[no-any-return]

        return replace_class(original, build)

    apply_patch("torch.device", replace, "emulator")
