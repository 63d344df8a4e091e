"""Whether a device is the host itself: the one question about a device's name that is asked everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["is_host"]


def is_host(device: torch.device) -> bool:
    """Whether what lies there lies in the host's memory, and its numbers are read without a wait."""
    return device.type == "cpu"
