"""Several processes, each with a virtual device: the vendor's backend of `torch.distributed` is gloo on the host.

A collective on virtual tensors arrives in dispatch as every operation does, and runs on the CPU tensors inside: gloo
carries them from process to process. The vendor's name for its backend is made known, so that programs need no change.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from anyaccel.backends.sheet import Distributed
from anyaccel.emulator.torch_patches import apply_patch, replace_by
from anyaccel.emulator.vendor_modules import install_package
from anyaccel.upstream.torch_internals import read_timeout

if TYPE_CHECKING:
    from anyaccel.emulator.accelerator import VirtualAccelerator

__all__ = ["install_collectives"]


def install_collectives(accelerator: VirtualAccelerator) -> None:
    """Let `init_process_group` take the backend that the sheet names, and import what brings it."""
    known = accelerator.sheet.distributed
    if not isinstance(known, Distributed) or not torch.distributed.is_available():
        return
    if known.module:
        install_package(known.module)
    if hasattr(torch.distributed.Backend, known.backend.upper()):
        _stand_in(known.backend)
    else:
        torch.distributed.Backend.register_backend(known.backend, _make_gloo, devices=["cpu", accelerator.name])


def _stand_in(name: str) -> None:
    """Torch knows some vendors' backends by name, and asks whether it was built with one before it makes it."""
    module = torch.distributed.distributed_c10d
    if not getattr(module, f"is_{name}_available", lambda: True)():
        apply_patch(f"{module.__name__}.is_{name}_available", replace_by(lambda: True), "emulator")
        apply_patch(f"{module.__name__}.ProcessGroup{name.upper()}", replace_by(_BuiltIn), "emulator")


class _BuiltIn:
    """A backend that torch makes with options of its own."""

    Options = SimpleNamespace

    def __new__(cls, store: Any, rank: int, size: int, options: Any) -> Any:
        """A gloo backend in its place."""
        return _make_gloo(store, rank, size, read_timeout(options))


def _make_gloo(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return torch.distributed.ProcessGroupGloo(store, rank, size, timeout)
