"""Where something lies: on the host itself, or on the kind of device that was chosen, whichever that is."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["is_host", "is_on"]


def is_host(device: torch.device | str) -> bool:
    """Whether what lies there lies in the host's memory, and its numbers are read without a wait."""
    return is_on(device, "cpu")


def is_on(device: torch.device | str, kind: str) -> bool:
    """Whether what lies there lies on a device of the chosen kind: `is_on(tensor.device, chosen.type)`.

    A string is read as torch reads it: `cuda`, `cuda:1`.
    """
    return (device.partition(":")[0] if isinstance(device, str) else device.type) == kind
