"""Overrides for a module's `forward` method; no other file in anyaccel assigns `module.forward`.

A `ForwardOverrides` object in `module.__dict__['forward']` runs the module's overrides, outermost
first, around the original forward, which is looked up at call time. The module is not wrapped, so
`isinstance`, adapters, `state_dict`, copying and pickling work as before.

Hooks from accelerate and diffusers also replace `module.forward`, and later restore the forward
that they replaced. They may be added before or after the overrides. A hook that is added later runs
around the overrides until `refresh_overrides` makes them the outermost again; a placed pipeline
does this on every call. Removing a hook may restore an outdated `ForwardOverrides`, which only
calls the original forward.

Copies of a module (`copy.copy`, `copy.deepcopy`, `pickle`) have no overrides.

Known limitation: a copy that is made from `module.__dict__`, as in `nn.DataParallel`, uses the
original's weights, as with any replaced forward. A placed pipeline corrects this before a call. See
docs/decisions/0014-forward-overrides.md.
"""

from __future__ import annotations

import copy
import functools
import inspect
import operator
import weakref
from collections.abc import Callable
from enum import IntEnum
from types import CodeType, FunctionType, MethodType
from typing import Any, TypeAlias

import torch

from anyaccel.copied_state import STATE_KEY, replace_state_entries
from anyaccel.upstream.torch_compile_internals import find_dynamo_callback
from anyaccel.upstream.torch_internals import is_transformed

__all__ = [
    "OVERRIDES_KEY",
    "ForwardOverrides",
    "Override",
    "Slot",
    "find_replaced_forward",
    "get_override",
    "refresh_overrides",
    "remove_override",
    "run_beneath",
    "set_override",
]

Forward: TypeAlias = Callable[..., Any]
# Takes the forward beneath it and the call arguments, returns the output.
Override: TypeAlias = Callable[[Forward, tuple[Any, ...], dict[str, Any]], Any]
# The attribute of a module that holds its overrides. `copy` and `pickle` call it to read the state of the module.
OVERRIDES_KEY = STATE_KEY


class Slot(IntEnum):
    """Slots for forward overrides.

    A module has at most one override per slot. An override in a lower slot runs around those in higher
    slots.
    """

    INPUTS = 0
    """Device and dtype of inputs, torch function modes, NaN check."""
    RECORDING = 1
    """Records calls for `anyaccel check`, or runs them with shapes only."""
    BATCHING = 2
    """Joins the calls of several requests into one batch."""
    CFG_SPLIT = 3
    """Splits the batch of classifier-free guidance over two ranks."""
    STEP_SKIPPING = 4
    """Returns the output of an earlier step."""
    WEIGHTS = 5
    """Moves offloaded weights to the device."""
    ROWS = 6
    """Runs a few rows of a batch at a time."""
    CAPTURE = 7
    """Captures and replays device graphs."""
    COMPILE = 8
    """Runs compiled code."""


class _Chain:
    """The overrides of one module, in slot order, stored in the module's `__dict__`."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = weakref.ref(module)
        self.slots: dict[Slot, Override] = {}
        self.ordered: tuple[Override, ...] = ()
        self.top: weakref.ref[ForwardOverrides] | None = None
        """The object that runs them: the outermost forward when overrides were last installed."""

    def change(self, slot: Slot, override: Override | None) -> None:
        slots = {**self.slots, slot: override}
        self.slots = {key: value for key, value in slots.items() if value is not None}
        self.ordered = tuple(self.slots[key] for key in sorted(self.slots))

    def __call__(self) -> Any:
        """Return the state of the module for a copy or a pickle: without overrides."""
        module = _get_module(self.module)
        forward = vars(module).get("forward")
        return replace_state_entries(
            module, {"forward": forward.beneath if isinstance(forward, ForwardOverrides) else forward}
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> _Chain:
        return self  # some modules copy their `__dict__`; the overrides have no effect in another module


def _find_chain(module: torch.nn.Module) -> _Chain | None:
    chain = vars(module).get(OVERRIDES_KEY)
    return chain if isinstance(chain, _Chain) and chain.module() is module else None


def _has_foreign_chain(module: torch.nn.Module) -> bool:
    return _find_chain(module) is None and isinstance(vars(module).get(OVERRIDES_KEY), _Chain)


def _get_module(reference: weakref.ref[torch.nn.Module]) -> torch.nn.Module:
    module = reference()
    if module is None:
        raise ReferenceError("the module that this forward method belongs to no longer exists")
    return module


class ForwardOverrides:
    """Callable that replaces a module's `forward` and runs the module's overrides."""

    def __init__(self, module: torch.nn.Module, beneath: Forward | None, chain: _Chain) -> None:
        # A strong reference would form a cycle: a deleted pipeline would hold its memory until the next collection.
        self._module = weakref.ref(module)
        self._chain = chain
        self.beneath = beneath
        """Another library's replacement of the forward; None for the class's own, which is looked up at call time."""
        original = type(module).forward if beneath is None else beneath
        self.__module__, self.__doc__ = getattr(original, "__module__", ""), original.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's overrides around its original forward.

        In a module that was compiled with torch.compile or exported, only the original forward runs.
        """
        # Overrides have side effects that torch.compile, torch.export and vmap must not trace.
        if torch.compiler.is_compiling() or find_dynamo_callback():
            return self._run_original(*args, **kwargs)
        top = self._chain.top
        if top is None or top() is not self or is_transformed():
            return self._run_original(*args, **kwargs)
        return self._run(self._chain.ordered, *args, **kwargs)

    def _run(self, overrides: tuple[Override, ...], /, *args: Any, **kwargs: Any) -> Any:
        if not overrides:
            return self._run_original(*args, **kwargs)
        return overrides[0](functools.partial(self._run, overrides[1:]), args, kwargs)

    def _run_original(self, *args: Any, **kwargs: Any) -> Any:
        if self.beneath is not None:
            return self.beneath(*args, **kwargs)
        module: Any = _get_module(self._module)
        forward = type(module).forward
        if not isinstance(forward, FunctionType):  # a class method, or a built-in function such as `torch.sin`
            return forward(*args, **kwargs)
        return forward(module, *args, **kwargs)  # Dynamo cannot trace a bound method created here

    def _get_original(self) -> Any:
        module = _get_module(self._module)
        return MethodType(type(module).forward, module) if self.beneath is None else self.beneath

    # Programs inspect the forward method of a model: pipelines its signature, torch.export its code, and accelerate
    # `__wrapped__` and `__func__`, which it binds again.
    def __getattr__(self, name: str) -> Any:
        if self._module() is None:
            raise AttributeError(name)
        return getattr(self._get_original(), name)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._get_original())

    @property
    def __code__(self) -> CodeType:
        code: CodeType = inspect.unwrap(self._get_original()).__code__
        return code

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # `inspect` examines only methods and functions.
        is_method = self._module() is not None and isinstance(self._get_original(), MethodType)
        return MethodType if is_method else ForwardOverrides

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A hook of another library refers to it. The copy has no overrides and runs its own weights.
        module = _get_module(self._module)
        copied = memo.get(id(module), module)
        return ForwardOverrides(copied, copy.deepcopy(self.beneath, memo), _Chain(copied))

    def __reduce__(self) -> tuple[Any, ...]:
        if self.beneath is not None:
            return operator.itemgetter(0), ((self.beneath,),)
        return getattr, (
            _get_module(self._module),
            "forward",
        )  # finds the class's method: pickle restores `__dict__` later


def set_override(module: torch.nn.Module, slot: Slot, override: Override) -> None:
    """Set a module's override for a slot, replacing any existing one."""
    chain = _find_chain(module) or _Chain(module)
    _install(module, chain)
    chain.change(slot, override)


def get_override(module: Any, slot: Slot) -> Override | None:
    """Return a module's override for a slot, or None if none is set."""
    chain = _find_chain(module) if isinstance(module, torch.nn.Module) else None
    return None if chain is None else chain.slots.get(slot)


def remove_override(module: torch.nn.Module, slot: Slot) -> None:
    """Remove a module's override for a slot; removing the last one restores the original forward."""
    chain = _find_chain(module)
    if chain is None:
        return
    chain.change(slot, None)
    if chain.ordered:
        return
    del vars(module)[OVERRIDES_KEY]
    chain.top = None
    forward = vars(module).get("forward")
    if isinstance(forward, ForwardOverrides):
        if forward.beneath is None:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = forward.beneath


def find_replaced_forward(module: torch.nn.Module) -> Any:
    """Return the forward that a user or another library assigned to a module, beneath its overrides, or None."""
    forward = vars(module).get("forward")
    if isinstance(forward, ForwardOverrides) and forward._module() is module:
        forward = forward.beneath
    # A hook may restore the bound method of the class. That of another model is a replacement.
    is_own = getattr(forward, "__self__", None) is module and getattr(forward, "__func__", None) is type(module).forward
    return None if is_own else forward


def refresh_overrides(module: torch.nn.Module) -> None:
    """Make a module's overrides outermost again, after hooks from other libraries replaced its forward."""
    chain = _find_chain(module)
    if chain is not None:
        _install(module, chain)


def run_beneath(module: torch.nn.Module, slot: Slot, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a module's forward with only the overrides in slots above `slot`."""
    chain = _find_chain(module)
    top = None if chain is None or chain.top is None else chain.top()
    if chain is None or top is None:
        return module.forward(*args, **kwargs)
    return top._run(tuple(chain.slots[key] for key in sorted(chain.slots) if key > slot), *args, **kwargs)


def _install(module: torch.nn.Module, chain: _Chain) -> None:
    """Set a module's `forward` to a `ForwardOverrides` object that runs the given overrides."""
    forward = vars(module).get("forward")
    if isinstance(forward, ForwardOverrides):
        # Copied with the `__dict__` of another module, and not assigned as in `module.forward = other.forward`.
        if forward._module() is not module and _has_foreign_chain(module):
            forward = forward.beneath
    elif isinstance(forward, MethodType) and forward.__self__ is module and forward.__func__ is type(module).forward:
        forward = None  # a hook restored the forward of the class
    if not isinstance(forward, ForwardOverrides) or forward._module() is not module:
        forward = vars(module)["forward"] = ForwardOverrides(module, forward, chain)
    forward._chain = chain
    chain.top = weakref.ref(forward)
    vars(module)[OVERRIDES_KEY] = chain
