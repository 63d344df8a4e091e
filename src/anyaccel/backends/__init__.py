"""The accelerators: one file each, and what reads them.

A new accelerator is one new file here with a `BACKEND`, or a plugin that brings one; nothing else changes.
"""

from anyaccel.backends.driver import Driver, Memory
from anyaccel.backends.registry import Backend
from anyaccel.backends.sheet import Sheet

__all__ = ["Backend", "Driver", "Memory", "Sheet"]
