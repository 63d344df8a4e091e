"""Data classes for the device under test and for the result of a probe."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anyaccel.backends.device import open_device
from anyaccel.backends.sheet import Sheet
from anyaccel.errors import NotMeasurableError, summarize_error

if TYPE_CHECKING:
    import torch

    from anyaccel.backends.driver import Driver
    from anyaccel.emulator.accelerator import VirtualAccelerator

__all__ = ["Observation", "ProbeContext", "describe_error", "seeded_randn"]

# Absolute POSIX and Windows folders, but not the paths of URLs.
_FOLDERS = re.compile(r"(?<![\w:/])(?:/[^\s/:'\"]+)+/|\b[A-Za-z]:\\(?:[^\s\\]+\\)+")


@dataclass(frozen=True)
class Observation:
    """Result of a probe: the observed effect, and the measured values or the reason for a skip."""

    seen: str
    """`yes`, an effect such as `error`, or empty if the probe did not run."""
    detail: str = ""
    """Measured values, or the reason why the probe did not run."""


@dataclass(frozen=True)
class ProbeContext:
    """Device to probe, with its sheet for the detected product and versions.

    The sheet does not include results of earlier probes.
    """

    sheet: Sheet
    driver: Driver
    index: int
    product: str | None = None
    accelerator: VirtualAccelerator | None = None
    quick: bool = False

    @property
    def device(self) -> torch.device:
        """The `torch.device` to probe; reading this property loads the driver."""
        import torch

        self.driver.load()
        return torch.device(self.sheet.torch_name, self.index)

    @property
    def virtual(self) -> bool:
        """Whether the device is virtual."""
        return self.accelerator is not None

    def spare_bytes(self) -> int:
        """Return the number of bytes that a probe may use: a third of the free memory."""
        # The tensors of a virtual device are in host memory.
        if self.virtual:
            return open_device("cpu").driver.memory(0).free_bytes // 3
        try:
            return self.driver.memory(self.index).free_bytes // 3
        except NotMeasurableError:
            return 0  # skips the large probes


def describe_error(error: BaseException) -> str:
    """Summarize an error in one line, without local folder names, because evidence files are published."""
    return _FOLDERS.sub("", summarize_error(error))[:300]


def seeded_randn(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Return a CPU tensor of normally distributed values that depends only on the shape and the seed."""
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
