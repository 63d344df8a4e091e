"""One thing that somebody did on a real device, as data and a snippet.

A failure goes in where it follows from what the program asked of the device: a number type, an operation, a size, a
draw, a tensor of another device. One that comes from the version of a driver or a system alone stays out.
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
    """A failure that was seen on hardware, or something that is known to run right there."""

    name: str
    """Unique, the device first: `mps-helios-schedule`."""
    device: str
    effect: Effect | None
    """What the device did; None where all went well."""
    thread: str
    """The address of the public thread, document or source that says so."""
    says: str
    """What it says, in one sentence."""
    run: Snippet
    """What the user, the pipeline or the scheduler did, at a tiny size."""
    product: str | None = None
    """The product it was seen on, where that matters, or a size of memory: `gaudi1`, `1MiB`."""
    strict_error: str | None = None
    """The kind of error that the thread shows: `TypeError`. Only a raise of this kind counts as the failure."""
    site: str | None = None
    """The file of diffusers or transformers that the thread is about; None where it is the snippet itself."""
    limit: str = ""
    """A part of the limit's name, so that another limit that the snippet meets by the way does not count."""

    @property
    def file(self) -> str:
        """The file in which the ledger must find the fault."""
        return self.site or inspect.getfile(self.run)
