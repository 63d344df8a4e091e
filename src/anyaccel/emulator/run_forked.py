"""Execution of functions in forked processes, each with its own virtual accelerator.

A process can have only one virtual accelerator, and a new interpreter takes seconds to import
torch. Each call therefore forks the current process, which has already imported torch and must not
start a virtual accelerator itself.
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
    """Call `function(accelerator)` in a forked process with the virtual device, and return the result.

    Raises VirtualDeviceError if the process exits without a result.
    """

    def call() -> T:
        with virtual(device, count=count, memory=memory, strict=strict) as accelerator:
            return function(accelerator)

    # A fork instead of a new interpreter: torch and diffusers are already imported.
    try:
        return call_in_fork(call, name=f"the virtual {device} device", timeout_s=timeout_s)
    except ProcessDiedError as error:
        hint = f"run the same code with ANYACCEL_VIRTUAL={device} to see its output"
        raise VirtualDeviceError(error.message, hint=hint) from None
