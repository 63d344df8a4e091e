"""Private details of accelerate. Seen in accelerate 1.15.0. Paths below are relative to the package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["HOOK_ATTRIBUTES", "find_hook", "has_hook"]

HOOK_ATTRIBUTES = ("_hf_hook", "_old_forward")
"""What `add_hook_to_module` sets on a module, besides `forward` (hooks.py)."""


def find_hook(module: Any) -> Any:
    """Return the `ModelHook` of a module; None without one (hooks.py, `add_hook_to_module`)."""
    return getattr(module, "_hf_hook", None)


def has_hook(attributes: Mapping[str, Any]) -> bool:
    """Return whether a module with this `__dict__` has a hook; `hasattr` is slow on modules (hooks.py)."""
    return "_hf_hook" in attributes
