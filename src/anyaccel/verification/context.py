"""The device that is probed, with its sheet; and how what was seen is told."""

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

__all__ = ["Observation", "ProbeContext", "describe_error", "fill"]

_FOLDERS = re.compile(r"(?<![\w:/])(?:/[^\s/:'\"]+)+/|\b[A-Za-z]:\\(?:[^\s\\]+\\)+")


@dataclass(frozen=True)
class Observation:
    """What was seen: `yes` or an effect, with the figures; nothing where it was not tried, and why."""

    seen: str
    detail: str = ""


@dataclass(frozen=True)
class ProbeContext:
    """A device and its sheet as it reads for the product and the versions, before the device was asked anything."""

    sheet: Sheet
    driver: Driver
    index: int
    product: str | None = None
    accelerator: VirtualAccelerator | None = None
    quick: bool = False

    @property
    def device(self) -> torch.device:
        """The device in torch's terms."""
        import torch

        self.driver.load()
        return torch.device(self.sheet.torch_name, self.index)

    @property
    def virtual(self) -> bool:
        """Whether the device is a virtual one."""
        return self.accelerator is not None

    def spare_bytes(self) -> int:
        """How much a probe may take: a third of what is free; the host's, where the device is virtual."""
        if self.virtual:
            return open_device("cpu").driver.memory(0).free_bytes // 3
        try:
            return self.driver.memory(self.index).free_bytes // 3
        except NotMeasurableError:
            return 0


def describe_error(error: BaseException) -> str:
    """An error in one line, without the folders of this machine."""
    return _FOLDERS.sub("", summarize_error(error))[:300]


def fill(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """The same normal numbers every time, on the host."""
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
