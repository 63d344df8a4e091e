"""A fingerprint of a module: whether it is still what was compiled or captured.

It covers what a replay cannot see: where weights are stored, every attribute of every layer and attention processor,
hooks, adapters, and functions that were patched on classes and modules. Comparing takes a few milliseconds for a large
UNet, while the device works.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from itertools import chain
from operator import eq, is_
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType
from typing import Any

import torch
from torch.nn import functional

from anyaccel.forward_overrides import OVERRIDES_KEY, ForwardOverrides
from anyaccel.upstream import accelerate_internals, diffusers_internals
from anyaccel.upstream.torch_internals import (
    CONVOLUTION_FORWARD,
    FORWARD_HOOK_TABLES,
    WEIGHT_TABLES,
    read_child_table,
    read_global_hooks,
    read_hook_tables,
)

__all__ = ["LayerHooks", "ModuleFingerprint", "PatchedCode", "find_custom_code"]

_ENTRIES = ("forward", "__call__", CONVOLUTION_FORWARD)
_CODE = (FunctionType, BuiltinFunctionType, MethodDescriptorType, classmethod, staticmethod, property)
_KNOWN = frozenset(("torch", "diffusers", "transformers", "peft", "torchao", "accelerate", "anyaccel"))
"""Libraries whose layers and processors do the same at every call."""


class LayerHooks:
    """The hooks of the layers inside a module, torch's global ones, and those of other libraries."""

    def __init__(self, module: torch.nn.Module) -> None:
        inside = [part for part in module.modules() if part is not module]
        tables = [table for part in inside for table in read_hook_tables(part)]
        self._tables = [*tables, *read_global_hooks()]
        self._module = weakref.ref(module)  # weak: the module holds this among its attributes
        self._layers = [part.__dict__ for part in inside]
        self._forward = type(module).forward
        self._children = [read_child_table(part) for part in module.modules()]
        self._known = [list(children.values()) for children in self._children]

    def any(self) -> bool:
        """Return whether there is one."""
        return any(self._tables)

    def has_foreign_forward(self) -> bool:
        """Return whether another library replaced the forward of the module or of a layer."""
        module = self._module()
        if module is None:
            return False
        forward = vars(module).get("forward")
        if isinstance(forward, ForwardOverrides):
            forward = forward.beneath
        if forward is not None and getattr(forward, "__func__", None) is not self._forward:
            return True
        return any(
            accelerate_internals.has_hook(layer) or diffusers_internals.has_hook(layer)
            for layer in (vars(module), *self._layers)
        )

    def covers_all_layers(self) -> bool:
        """Return whether the module still has the layers that it had: adapters replace some."""
        return all(map(eq, map(list, map(dict.values, self._children)), self._known))


class PatchedCode:
    """The functions that a module's code consists of; tells whether somebody patched one since."""

    def __init__(self, module: torch.nn.Module, *others: Any) -> None:
        self._classes = _list_classes(module)
        families = {base for kind in self._classes for base in kind.__mro__ if base is not object}
        sources = {base.__module__ for base in families} & set(sys.modules)
        spaces = [vars(owner) for owner in (*families, *(sys.modules[name] for name in sources), functional, *others)]
        self._functions = [
            (space, name, value)
            for space in spaces
            for name, value in space.items()
            # Dynamo itself patches `Module.__init__` and `__setstate__` when it first compiles (torch 2.11 to 2.13).
            if isinstance(value, _CODE) and (name == "__call__" or not name.startswith("__"))
        ]
        self._entries = list(self._read_entries())

    def changed(self) -> bool:
        """Return whether a class, a module or `torch.nn.functional` has another function now."""
        if any(space.get(name) is not value for space, name, value in self._functions):
            return True
        return not _are_same(list(self._read_entries()), self._entries)

    def _read_entries(self) -> Iterator[Any]:
        """Yield what is called first; a patch may add a method that a class inherited before."""
        return (getattr(kind, name, None) for kind in self._classes for name in _ENTRIES)


def find_custom_code(module: torch.nn.Module) -> str:
    """Return what in a module is a user's own code, which a replay would not run; empty if nothing is.

    Functions are judged by the module they were defined in, so that `functools.wraps` does not hide a patch.
    """
    for kind in _list_classes(module):
        if not _is_known(kind.__module__):
            return kind.__name__
        for name in _ENTRIES:
            function = getattr(kind, name, None)
            if function is not None and not _is_known(_find_source(function)):
                return f"a patched {kind.__name__}.{name}"
    for part in module.modules():
        for name, value in vars(part).items():
            if not callable(value) or isinstance(value, torch.nn.Module | ForwardOverrides):
                continue
            if callable(getattr(type(part), name, None)) and not _is_known(_find_source(value)):
                return f"another {name} of {type(part).__name__}"
    return ""


def _list_classes(module: torch.nn.Module) -> list[type]:
    processors = (vars(part).get("processor") for part in module.modules())
    return list(dict.fromkeys(map(type, chain(module.modules(), filter(None, processors)))))


def _find_source(function: Any) -> str:
    """Return the name of the module in which a function was defined."""
    function = getattr(function, "__func__", getattr(function, "func", function))
    names = getattr(function, "__globals__", None)
    return str(names.get("__name__") if names is not None else getattr(function, "__module__", ""))


def _is_known(source: str) -> bool:
    return source.partition(".")[0] in _KNOWN


class ModuleFingerprint:
    """What a module was when this was made."""

    def __init__(self, module: torch.nn.Module) -> None:
        # Weak, since the module holds this among its attributes: a cycle would keep its weights until a collection.
        self._module = weakref.ref(module)
        self._inside = [part.__dict__ for part in module.modules() if part is not module]
        self._code = PatchedCode(module, torch, torch.Tensor)
        self._parts = [weakref.ref(part) for part in module.modules()]
        self._types = list(self._read_types())
        layers = list(self._read_layers())
        processors = [vars(item) for layer in layers if hasattr(item := layer.get("processor"), "__dict__")]
        owned = [pair for owner in (*layers, *processors) for pair in owner.items()]
        self._lists = [value for _, value in owned if type(value) is list]
        named = [
            value
            for name, value in owned
            if (type(value) is dict and name not in WEIGHT_TABLES) or name in FORWARD_HOOK_TABLES
        ]
        self._dicts = [*processors, *named]
        self._weights = [layer[name] for layer in layers for name in WEIGHT_TABLES]
        self._attributes = list(self._read_attributes())
        # Weak references to tensors, so that a fingerprint does not keep memory.
        self._items = [weakref.ref(item) if isinstance(item, torch.Tensor) else item for item in self._read_items()]
        self._addresses = list(self._read_addresses())
        self._counts = self._count()

    def holds(self) -> bool:
        """Return whether nothing changed since."""
        return (
            self._count() == self._counts
            and all(map(is_, self._read_types(), self._types))
            and all(map(is_, self._read_attributes(), self._attributes))
            and not self._code.changed()
            and all(map(_is_same_item, self._read_items(), self._items))
            and all(map(eq, self._read_addresses(), self._addresses))
        )

    def _read_layers(self) -> Iterator[dict[str, Any]]:
        """Yield the attributes of every layer, the module's own first; nothing for a module that was released."""
        module = self._module()
        return iter(()) if module is None else chain([vars(module)], self._inside)

    def _count(self) -> list[int]:
        # Compared first, since `map` ends with the shorter side.
        tensor = vars(torch.Tensor)  # which inherits most methods: a patch adds one
        return [len(owner) for owner in chain([tensor], self._read_layers(), self._dicts, self._lists, self._weights)]

    def _read_types(self) -> Iterator[type]:
        return (type(part()) for part in self._parts)

    def _read_attributes(self) -> Iterator[Any]:
        return chain.from_iterable(
            _without_overrides(layer) if OVERRIDES_KEY in layer or "forward" in layer else layer.values()
            for layer in self._read_layers()
        )

    def _read_items(self) -> Iterator[Any]:
        """Yield what lists and dictionaries hold: layers, hooks, adapter scales, which are changed in place."""
        return chain(chain.from_iterable(table.values() for table in self._dicts), *self._lists)

    def _read_addresses(self) -> Iterator[Any]:
        weights = chain.from_iterable(table.values() for table in self._weights)
        return ((weight.data_ptr(), weight.stride()) for weight in weights if weight is not None)


def _without_overrides(layer: dict[str, Any]) -> Iterator[Any]:
    """Yield a layer's attributes; overrides of ours count only as what they found beneath them."""
    for name, value in layer.items():
        if name == OVERRIDES_KEY:
            continue
        if name != "forward" or not isinstance(value, ForwardOverrides):
            yield value
        elif value.beneath is not None:
            yield value.beneath


def _are_same(seen: list[Any], known: list[Any]) -> bool:
    return len(seen) == len(known) and all(map(is_, seen, known))


def _is_same_item(seen: Any, known: Any) -> bool:
    return seen is known or (type(known) is weakref.ref and known() is seen)
