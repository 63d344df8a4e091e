"""Private APIs of accelerate, as of accelerate 1.15.0. File paths are relative to its package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from accelerate.hooks import SequentialHook, remove_hook_from_module

__all__ = [
    "HOOK_ATTRIBUTES",
    "find_hook",
    "find_hook_of_class",
    "find_hooked_forward",
    "has_hook",
    "remove_hook",
    "set_hook",
]

_Hook = TypeVar("_Hook")

# Attributes that `add_hook_to_module` sets on a module in addition to `forward` (hooks.py).
HOOK_ATTRIBUTES = ("_hf_hook", "_old_forward")


def find_hook_of_class(module: Any, kind: type[_Hook]) -> _Hook | None:
    """Return a module's hook of a class, also from a `SequentialHook`; None if there is none (hooks.py)."""
    hook = find_hook(module)
    hooks = hook.hooks if isinstance(hook, SequentialHook) else (hook,)
    return next((entry for entry in hooks if isinstance(entry, kind)), None)


def find_hook(module: Any) -> Any:
    """Return a module's `ModelHook`, or None (hooks.py, `add_hook_to_module`)."""
    # Not `getattr`: modules that wrap a model, such as those of PEFT, delegate unknown attributes to it.
    return vars(module).get("_hf_hook")


def set_hook(module: Any, hook: Any) -> None:
    """Set a module's `ModelHook` without replacing its `forward` (hooks.py, `add_hook_to_module`).

    Autoencoders of diffusers call `hook.pre_forward` in `encode` and `decode` (utils/accelerate_utils.py of diffusers).
    """
    hook.init_hook(module)
    before = find_hook(module)
    module._hf_hook = hook if before is None else SequentialHook(before, hook)


def remove_hook(module: Any, kinds: tuple[Any, ...]) -> None:
    """Remove a module's hook if it is of one of these classes; of a `SequentialHook`, remove only these (hooks.py)."""
    hook = find_hook(module)
    hooks: tuple[Any, ...] = hook.hooks if isinstance(hook, SequentialHook) else (hook,)
    kept = [entry for entry in hooks if not isinstance(entry, kinds)]
    if len(kept) == len(hooks):
        return
    if not kept:
        remove_hook_from_module(module)
        return
    for entry in hooks:
        if isinstance(entry, kinds):
            entry.detach_hook(module)
    module._hf_hook = kept[0] if len(kept) == 1 else SequentialHook(*kept)


def has_hook(attributes: Mapping[str, Any]) -> bool:
    """Return whether a module with the given `__dict__` has an accelerate hook (hooks.py)."""
    # Not `hasattr`, which is slow for missing attributes (`nn.Module.__getattr__`): this runs for every layer.
    return "_hf_hook" in attributes


def find_hooked_forward(attributes: Mapping[str, Any]) -> Any:
    """Return the forward that the hook of a module with the given `__dict__` replaced, or None (hooks.py)."""
    return attributes.get("_old_forward")
