"""A process for each virtual accelerator: there is one a process, and importing torch anew takes seconds.

The caller imports what it needs once and stays without a virtual device; each call forks from there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.activation import virtual
from anyaccel.errors import ProcessDiedError, VirtualDeviceError
from anyaccel.processes.forked_call import call_in_fork

__all__ = ["run_forked"]

T = TypeVar("T")


def run_forked(
    device: str,
    function: Callable[[VirtualAccelerator], T],
    *,
    count: int = 1,
    memory: str | int | None = None,
    strict: bool = False,
    timeout_s: float = 600.0,
) -> T:
    """Call `function(accelerator)` in a process of its own that has the virtual device, and give its result."""

    def use() -> T:
        with virtual(device, count=count, memory=memory, strict=strict) as accelerator:
            return function(accelerator)

    try:
        return call_in_fork(use, name=f"a virtual {device}", timeout_s=timeout_s)
    except ProcessDiedError as death:
        hint = "run the same with ANYACCEL_VIRTUAL set to see what it printed"
        raise VirtualDeviceError(death.message, hint=hint) from None
