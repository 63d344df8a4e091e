"""Where something lies: on the host itself, or on the kind of device that was chosen, whichever that is."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["is_host", "is_on"]


def is_host(device: torch.device) -> bool:
    """Whether what lies there lies in the host's memory, and its numbers are read without a wait."""
    return device.type == "cpu"


def is_on(device: torch.device, kind: str) -> bool:
    """Whether what lies there lies on a device of the chosen kind: `is_on(tensor.device, chosen.type)`."""
    return device.type == kind
