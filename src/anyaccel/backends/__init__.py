"""Accelerator backends: a capability sheet and a driver per accelerator, and the backend registry.

To add an accelerator, define `BACKEND` in a new module in `devices`, or publish a plugin package
that provides a `Backend`.
"""

from anyaccel.backends.driver import Driver, Memory
from anyaccel.backends.registry import Backend
from anyaccel.backends.sheet import Sheet

__all__ = ["Backend", "Driver", "Memory", "Sheet"]
