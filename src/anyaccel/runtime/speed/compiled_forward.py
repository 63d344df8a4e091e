"""Compiled forwards that fall back to eager mode when compilation fails or the module changes.

`torch.compile` does not guard against patched functions or against hooks that are added to layers
later. This module checks for both.
"""

from __future__ import annotations

import logging
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from anyaccel.backends.out_of_memory import is_out_of_memory
from anyaccel.errors import summarize_error
from anyaccel.forward_overrides import Slot, get_override, set_override
from anyaccel.runtime.library_code import is_library
from anyaccel.runtime.module_fingerprint import LayerHooks, PatchedCode, is_in_training
from anyaccel.runtime.workarounds.function_modes import has_foreign_modes
from anyaccel.upstream.torch_compile_internals import (
    COMPILER_MODULES,
    is_compiler_error,
    remove_compiled_call,
    remove_damaged_library,
    restore_compiled_call,
)

__all__ = ["CompiledForward", "compile_blocks", "compile_forward", "find_compiled", "remove_compiled_blocks"]

# Dynamo skips guards on hooks by default (skip_nnmodule_hook_guards), so compiled code silently ignores hooks that are
# added after the first call: https://github.com/pytorch/pytorch/issues/117758 and
# https://github.com/pytorch/pytorch/pull/98371 (torch 2.13).

_LOG = logging.getLogger("anyaccel")
Forward = Callable[..., Any]


class CompiledForward:
    """A `forward` override that runs compiled code and falls back to eager mode.

    Either the whole forward is compiled, or the module's repeated blocks are compiled in place.
    """

    def __init__(self, module: torch.nn.Module, name: str, compiled: Forward | None) -> None:
        self.name = name
        self.failure = ""
        """Why the module runs eagerly from now on; empty while it runs compiled."""
        self._module = weakref.ref(module)
        self._compiled = compiled
        """Takes the module as its first argument; None if blocks are compiled in place."""
        self._class = type(module)
        self._code = PatchedCode(module)
        # Apart: libraries patch `torch` for a short time, for example while they load a model in another thread.
        self._torch_code = PatchedCode(torch.nn.Module(), torch, torch.Tensor)
        self._is_torch_patched = False
        self._is_training = False
        self._hooks = LayerHooks(module)
        self._calls = self._calls_with_callback = 0
        self._lock = threading.Lock()

    @contextmanager
    def in_call(self, *, has_callback: bool = False) -> Iterator[None]:
        """Fall back to eager mode if the module has changed since compilation; then run a pipeline call.

        The check is not repeated in the `with` block, except if the call has a callback, which may change the module.
        """
        # A check before each forward would take some milliseconds for the UNet of SDXL.
        module = self._module()
        if module is not None:
            self._check(module)
        with self._lock:
            self._calls += 1
            self._calls_with_callback += has_callback
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1
                self._calls_with_callback -= has_callback

    def _check(self, module: torch.nn.Module) -> None:
        if self.failure:
            return
        if not self._hooks.covers_all_layers():
            self._hooks = LayerHooks(module)
        if type(module) is not self._class:
            self._fall_back(module, "its class was replaced after compilation")
        elif self._hooks.has_foreign_forward():
            self._fall_back(module, "another library replaced the forward method of the model or of a layer")
        elif self._code.changed():
            self._fall_back(module, "its code was patched after compilation")
        was_training, self._is_training = self._is_training, is_in_training(module)
        if self._is_training and not was_training:
            _LOG.warning("anyaccel: %s runs eagerly while it is in training mode", self.name)
        was_patched, self._is_torch_patched = self._is_torch_patched, self._torch_code.changed()
        if self._is_torch_patched and not was_patched:
            _LOG.warning("anyaccel: %s runs eagerly while a function of torch is patched", self.name)

    def __call__(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the compiled code; if it fails, run eagerly in this and all later calls."""
        module = self._module()
        if module is not None and (self._calls == 0 or self._calls_with_callback):  # also in calls by the user
            self._check(module)
        # With gradients, a second graph would be compiled for autograd, for a few calls at most (attend-and-excite).
        if self.failure or module is None or torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Compiled code would skip modes and patches, and draw other random numbers for dropout.
        if has_foreign_modes() or self._is_torch_patched or self._is_training:
            return _run_eagerly(module, forward, args, kwargs, keep_compiled=True)
        if self._hooks.any():
            if self._compiled is None:
                # Hooks of layers inside compiled blocks would not run.
                self._fall_back(module, "some layers have hooks")
            return forward(*args, **kwargs)
        try:
            return forward(*args, **kwargs) if self._compiled is None else self._compiled(module, *args, **kwargs)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            if remove_damaged_library(error):
                return self(forward, args, kwargs)  # compile again
            if _is_raised_by_user(error):  # an eager run would call the user's code twice
                raise
            # Run eagerly first: if that raises too, the error is the model's own and the compiled code stays.
            output = _run_eagerly(module, forward, args, kwargs)
            self._fall_back(module, summarize_error(error))
            _LOG.warning("anyaccel: failed to compile %s, running it eagerly: %s", self.name, self.failure)
            return output

    def _fall_back(self, module: torch.nn.Module, reason: str) -> None:
        self.failure = reason
        remove_compiled_blocks(module)


def compile_forward(module: torch.nn.Module, name: str, options: dict[str, Any]) -> None:
    """Compile a module's whole forward with `torch.compile`, with a fallback to eager mode."""
    # Compile the class's function: a bound method would keep the module alive.
    compiled = torch.compile(type(module).forward, **options)
    set_override(module, Slot.COMPILE, CompiledForward(module, name, compiled))


def compile_blocks(model: Any, name: str, options: dict[str, Any]) -> None:
    """Compile the repeated blocks of a diffusers model in place, with a fallback to eager mode."""
    model.compile_repeated_blocks(**options)
    set_override(model, Slot.COMPILE, CompiledForward(model, name, None))


def find_compiled(module: Any) -> CompiledForward | None:
    """Return the `CompiledForward` of a module, or None if the module is not compiled."""
    override = get_override(module, Slot.COMPILE)
    return override if isinstance(override, CompiledForward) else None


def remove_compiled_blocks(module: torch.nn.Module) -> list[tuple[torch.nn.Module, Any]]:
    """Undo the in-place compilation of a module's blocks; return each block with its compiled call."""
    removed = [(layer, remove_compiled_call(layer)) for layer in module.modules()]
    return [(layer, compiled) for layer, compiled in removed if compiled is not None]


def _is_raised_by_user(error: Exception) -> bool:
    """Return whether an error comes from the user's code, and not from the compiler or compiled code that it calls."""
    if is_compiler_error(error):
        return False
    is_users = False
    for frame, _ in traceback.walk_tb(error.__traceback__.tb_next if error.__traceback__ else None):
        source = frame.f_globals.get("__name__")
        if source is None or source.startswith(COMPILER_MODULES):  # generated code has no name
            is_users = False
        elif not is_library(source):
            is_users = True
    return is_users


def _run_eagerly(
    module: torch.nn.Module,
    forward: Forward,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    keep_compiled: bool = False,
) -> Any:
    """Run a module's forward with uncompiled blocks.

    Restore the compiled blocks if the forward raises, or in any case if `keep_compiled` is set.
    """
    removed = remove_compiled_blocks(module)
    finished = False
    try:
        output = forward(*args, **kwargs)
        finished = True
        return output
    finally:
        if keep_compiled or not finished:
            for layer, compiled in removed:
                restore_compiled_call(layer, compiled)
