"""Functions that check the type of a `torch.device` or a device string."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anyaccel.backends.device_spec import read_device_name

if TYPE_CHECKING:
    import torch

__all__ = ["is_host", "is_on"]


def is_host(device: torch.device | str) -> bool:
    """Return whether a device is the CPU, where tensor values can be read without synchronization."""
    return is_on(device, "cpu")


def is_on(device: torch.device | str, kind: str) -> bool:
    """Return whether a device has the given type, ignoring its index: `is_on("cuda:1", "cuda")`."""
    # Not torch.device(device): torch rejects types of plugins that are not imported.
    return (read_device_name(device) if isinstance(device, str) else device.type) == kind
