"""Compiled forwards: a module runs compiled code as long as that works, and eagerly otherwise.

torch.compile does not guard on everything that people change after the first call: hooks on layers
(Dynamo's option skip_nnmodule_hook_guards) and patched functions. Both are looked at here.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch

from anyaccel.backends.out_of_memory import is_out_of_memory
from anyaccel.errors import summarize_error
from anyaccel.forward_overrides import Slot, get_override, set_override
from anyaccel.runtime.speed.module_fingerprint import LayerHooks, PatchedCode
from anyaccel.upstream.torch_internals import forget_compiled_call, restore_compiled_call

__all__ = ["CompiledForward", "compile_blocks", "compile_forward", "find_compiled", "remove_compiled_blocks"]

_LOG = logging.getLogger("anyaccel")
Forward = Callable[..., Any]


class CompiledForward:
    """The override that runs a module's compiled forward, or a forward whose blocks were compiled in place."""

    def __init__(self, module: torch.nn.Module, name: str, compiled: Forward | None) -> None:
        self.name = name
        self.failure = ""
        """Why the module runs eagerly, for good."""
        self._module = weakref.ref(module)
        self._compiled = compiled
        """Takes the module as its first argument; None where blocks are compiled in place."""
        self._class = type(module)
        self._code = PatchedCode(module)
        self._hooks = LayerHooks(module)

    def begin_call(self) -> None:
        """Look at the module before a call of its pipeline."""
        module = self._module()
        if self.failure or module is None:
            return
        if not self._hooks.covers_all_layers():
            self._hooks = LayerHooks(module)
        if type(module) is not self._class:
            self._give_up(module, "its class was replaced after compiling")
        elif self._hooks.has_foreign_forward():
            self._give_up(module, "another library replaced its forward or that of a layer")
        elif self._code.changed():
            self._give_up(module, "its code was patched after compiling")

    def __call__(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output of the compiled code; where it fails, the eager output, and from then on only that."""
        module = self._module()
        if self.failure or module is None:
            return forward(*args, **kwargs)
        if self._hooks.any():
            if self._compiled is None:
                self._give_up(module, "layers have hooks")
            return forward(*args, **kwargs)
        try:
            return forward(*args, **kwargs) if self._compiled is None else self._compiled(module, *args, **kwargs)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            output = _run_eagerly(module, forward, args, kwargs)
            self._give_up(module, summarize_error(error))
            _LOG.warning("anyaccel: compiling %s failed, and it runs eagerly: %s", self.name, self.failure)
            return output

    def _give_up(self, module: torch.nn.Module, reason: str) -> None:
        self.failure = reason
        remove_compiled_blocks(module)


def compile_forward(module: torch.nn.Module, name: str, options: dict[str, Any]) -> None:
    """Let a module run its forward compiled as one graph."""
    # The class's function and not a bound method: a reference to the module would keep it alive.
    compiled = torch.compile(type(module).forward, **options)
    set_override(module, Slot.COMPILE, CompiledForward(module, name, compiled))


def compile_blocks(model: Any, name: str, options: dict[str, Any]) -> None:
    """Compile the blocks that a diffusers model repeats, in place."""
    model.compile_repeated_blocks(**options)
    set_override(model, Slot.COMPILE, CompiledForward(model, name, None))


def find_compiled(module: Any) -> CompiledForward | None:
    """Return a module's compiled forward, if it has one."""
    override = get_override(module, Slot.COMPILE)
    return override if isinstance(override, CompiledForward) else None


def remove_compiled_blocks(module: torch.nn.Module) -> list[tuple[torch.nn.Module, Any]]:
    """Let blocks that were compiled in place run eagerly; return what was removed, by module."""
    removed = [(part, forget_compiled_call(part)) for part in module.modules()]
    return [(part, compiled) for part, compiled in removed if compiled is not None]


def _run_eagerly(module: torch.nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a forward without its compiled blocks; restore them if the model itself raises."""
    removed = remove_compiled_blocks(module)
    try:
        return forward(*args, **kwargs)
    except BaseException:
        for part, compiled in removed:
            restore_compiled_call(part, compiled)
        raise
