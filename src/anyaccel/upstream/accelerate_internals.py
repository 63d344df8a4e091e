"""Private APIs of accelerate, as of accelerate 1.15.0. File paths are relative to its package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["HOOK_ATTRIBUTES", "find_hook", "find_hooked_forward", "has_hook", "set_hook"]

# Attributes that `add_hook_to_module` sets on a module in addition to `forward` (hooks.py).
HOOK_ATTRIBUTES = ("_hf_hook", "_old_forward")


def find_hook(module: Any) -> Any:
    """Return a module's `ModelHook`, or None (hooks.py, `add_hook_to_module`)."""
    # Not `getattr`: modules that wrap a model, such as those of PEFT, delegate unknown attributes to it.
    return vars(module).get("_hf_hook")


def set_hook(module: Any, hook: Any) -> None:
    """Set a module's `ModelHook` without replacing its `forward` (hooks.py, `add_hook_to_module`).

    Autoencoders of diffusers call `hook.pre_forward` in `encode` and `decode` (utils/accelerate_utils.py of diffusers).
    """
    hook.init_hook(module)
    module._hf_hook = hook


def has_hook(attributes: Mapping[str, Any]) -> bool:
    """Return whether a module with the given `__dict__` has an accelerate hook (hooks.py)."""
    # Not `hasattr`, which is slow for missing attributes (`nn.Module.__getattr__`): this runs for every layer.
    return "_hf_hook" in attributes


def find_hooked_forward(attributes: Mapping[str, Any]) -> Any:
    """Return the forward that the hook of a module with the given `__dict__` replaced, or None (hooks.py)."""
    return attributes.get("_old_forward")
