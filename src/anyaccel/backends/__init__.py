"""Backends: the sheets and drivers for all accelerators, and the registry that finds them.

To add an accelerator, add a module with a `BACKEND` to `devices`, or publish one as a plugin.
"""

from anyaccel.backends.driver import Driver, Memory
from anyaccel.backends.registry import Backend
from anyaccel.backends.sheet import Sheet

__all__ = ["Backend", "Driver", "Memory", "Sheet"]
