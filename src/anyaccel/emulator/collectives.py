"""The vendor's `torch.distributed` backend on virtual devices, implemented with gloo.

A collective on virtual tensors is dispatched like any other operation and runs on the inner CPU tensors, which
gloo can send. The backend is registered under the vendor's name (for example, `hccl`), so that programs run
without changes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from anyaccel.backends.sheet import Distributed
from anyaccel.emulator.torch_patch_registry import apply_patch, replace_by
from anyaccel.emulator.vendor_modules import install_package
from anyaccel.upstream.torch_internals import read_timeout

if TYPE_CHECKING:
    from anyaccel.emulator.accelerator import VirtualAccelerator

__all__ = ["install_collectives"]


def install_collectives(accelerator: VirtualAccelerator) -> None:
    """Register the `torch.distributed` backend that the sheet names, and make its package importable."""
    distributed = accelerator.sheet.distributed
    if not isinstance(distributed, Distributed) or not torch.distributed.is_available():
        return
    if distributed.module:
        install_package(distributed.module)
    # register_backend rejects names that torch already has (nccl, xccl).
    if hasattr(torch.distributed.Backend, distributed.backend.upper()):
        _replace_builtin_backend(distributed.backend)
    else:
        torch.distributed.Backend.register_backend(distributed.backend, _make_gloo, devices=["cpu", accelerator.name])


def _replace_builtin_backend(name: str) -> None:
    """Use gloo for a built-in `torch.distributed` backend that this torch build does not include."""
    module = torch.distributed.distributed_c10d
    # A torch built with the backend would use the real one; only a missing backend is replaced.
    if not getattr(module, f"is_{name}_available", lambda: True)():
        apply_patch(f"{module.__name__}.is_{name}_available", replace_by(lambda: True), "emulator")
        apply_patch(f"{module.__name__}.ProcessGroup{name.upper()}", replace_by(_GlooBackend), "emulator")


class _GlooBackend:
    """A gloo backend with the constructor signature of a built-in vendor backend."""

    Options = SimpleNamespace

    def __new__(cls, store: Any, rank: int, size: int, options: Any) -> Any:
        """Return a gloo process group; only the timeout is read from the options."""
        return _make_gloo(store, rank, size, read_timeout(options))


def _make_gloo(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return torch.distributed.ProcessGroupGloo(store, rank, size, timeout)
