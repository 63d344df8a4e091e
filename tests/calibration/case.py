"""A documented observation on a real device, with a snippet that reproduces it.

The cases are failures that the program causes with a dtype, an operation, a size, a random draw or a tensor on another
device. Failures that depend only on the version of a driver or operating system are not included.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch

from anyaccel.backends.claim import Effect

__all__ = ["Case", "Snippet"]

Snippet = Callable[[torch.device], None]


@dataclass(frozen=True)
class Case:
    """A failure that was observed on hardware, or code that is known to run correctly there."""

    name: str
    """A unique name that starts with the device: `mps-helios-timesteps`."""
    device: str
    effect: Effect | None
    """The effect on hardware; None if the code runs correctly."""
    thread: str
    """URL of the public issue, document or source."""
    says: str
    """Summary of the source in one sentence."""
    run: Snippet
    """The code of the user, pipeline or scheduler, at a tiny size."""
    product: str | None = None
    """The product, if it matters, or a memory size: `gaudi1`, `1MiB`."""
    strict_error: str | None = None
    """The error class in the source: `TypeError`. Only an error of this class counts as the failure."""
    site: str | None = None
    """The file of diffusers or transformers with the failing line; None if it is the snippet itself."""
    limit: str = ""
    """Part of the limit's name. Violations of other limits do not count."""

    @property
    def file(self) -> str:
        """The file that the ledger must report."""
        return self.site or inspect.getfile(self.run)
