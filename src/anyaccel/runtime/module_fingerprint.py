"""A fingerprint of a module: whether it is still what was compiled or captured.

It covers what a replay cannot see: where weights are stored, every attribute of every layer and attention processor,
hooks, adapters, and methods that were patched on classes. Comparing takes about a millisecond for a large UNet and
allocates nothing that the garbage collector tracks for long, since it happens at every step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch.nn import functional
from torch.nn.modules import module as torch_module

from anyaccel.forward_overrides import ForwardOverrides

__all__ = ["ModuleFingerprint", "PatchedClasses", "find_hook_tables"]

_WEIGHTS, _HOOKS = ("_parameters", "_buffers"), ("_forward_hooks", "_forward_pre_hooks")
_METHODS = ("forward", "__call__", "_conv_forward")


def find_hook_tables(module: torch.nn.Module) -> list[dict[int, Any]]:
    """Return the hook dictionaries of all layers inside a module, and torch's global ones; they are filled in place."""
    inside = [part for part in module.modules() if part is not module]
    tables = [table for part in inside for table in (part._forward_hooks, part._forward_pre_hooks)]
    return [*tables, torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks]


class PatchedClasses:
    """The functions that a module's classes had; tells whether somebody patched one since."""

    def __init__(self, module: torch.nn.Module) -> None:
        processors = (vars(part).get("processor") for part in module.modules())
        owners = chain(module.modules(), (processor for processor in processors if processor is not None))
        self._classes = list(dict.fromkeys(map(type, owners)))
        self._functions = list(self._read())

    def changed(self) -> bool:
        """Return whether a class or torch's attention has another function now."""
        return not _are_same(list(self._read()), self._functions)

    def _read(self) -> Iterator[Any]:
        yield functional.scaled_dot_product_attention
        for kind in self._classes:
            yield from (getattr(kind, name, None) for name in _METHODS)


class ModuleFingerprint:
    """What a module was when this was made."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._layers = [part.__dict__ for part in module.modules()]
        self._classes = PatchedClasses(module)
        processors = [vars(item) for layer in self._layers if hasattr(item := layer.get("processor"), "__dict__")]
        owned = [pair for owner in (*self._layers, *processors) for pair in owner.items()]
        self._lists = [value for _, value in owned if type(value) is list]
        named = [value for name, value in owned if (type(value) is dict and name not in _WEIGHTS) or name in _HOOKS]
        self._dicts = [*processors, *named]
        self._weights = [layer[name] for layer in self._layers for name in _WEIGHTS]
        self._attributes = list(self._read_attributes())
        # Weak references to tensors, so that a fingerprint does not keep memory.
        self._items = [weakref.ref(item) if isinstance(item, torch.Tensor) else item for item in self._read_items()]
        self._addresses = list(self._read_addresses())

    def holds(self) -> bool:
        """Return whether nothing changed since."""
        items = list(self._read_items())
        return (
            _are_same(list(self._read_attributes()), self._attributes)
            and not self._classes.changed()
            and len(items) == len(self._items)
            and all(map(_is_same_item, items, self._items))
            and list(self._read_addresses()) == self._addresses
        )

    def _read_attributes(self) -> Iterator[Any]:
        return chain.from_iterable(
            layer.values() if "forward" not in layer else _without_overrides(layer) for layer in self._layers
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
        if name != "forward" or not isinstance(value, ForwardOverrides):
            yield value
        elif value.beneath is not None:
            yield value.beneath


def _are_same(seen: list[Any], known: list[Any]) -> bool:
    return len(seen) == len(known) and all(map(is_, seen, known))


def _is_same_item(seen: Any, known: Any) -> bool:
    return seen is known or (type(known) is weakref.ref and known() is seen)
