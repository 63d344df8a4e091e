"""Known differences from stock diffusers that are not fixed yet. Remove an entry with its fix."""

from __future__ import annotations

__all__ = ["OPEN"]

OPEN: dict[str, dict[str, str]] = {}
"""For each variant, usages with the reason of the difference."""
