"""A snapshot of a model: whether it is still what it was, told in about a millisecond.

What was recorded or kept for a model holds for as long as its weights lie where they lay and every attribute of its
layers, and of what attends for them, is the object that it was. This is looked at before every picture, while the
device waits, so that nothing is built here that would be collected.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch.nn import functional

__all__ = ["Snapshot", "is_our_forward"]

_OURS = frozenset(("forward", "_anyaccel_boundary"))
"""What is put on layers here, and changes with plans."""
_WEIGHTS, _HOOKS = ("_parameters", "_buffers"), ("_forward_hooks", "_forward_pre_hooks")


class Snapshot:
    """What a model was when this was made."""

    def __init__(self, module: torch.nn.Module) -> None:
        parts = list(module.modules())
        self._layers = [part.__dict__ for part in parts]
        doers = [one for part in parts for one in (part, vars(part).get("processor")) if one is not None]
        self._kinds = list(dict.fromkeys(map(type, doers)))
        processors = [vars(one) for layer in self._layers if hasattr(one := layer.get("processor"), "__dict__")]
        owned = [pair for owner in (*self._layers, *processors) for pair in owner.items()]
        self._lists = [value for _, value in owned if type(value) is list]
        named = [value for name, value in owned if (type(value) is dict and name not in _WEIGHTS) or name in _HOOKS]
        self._dicts = [*processors, *named]
        self._weights = [layer[name] for layer in self._layers for name in _WEIGHTS]
        self._values, self._ways = list(self._read_values()), list(self._read_ways())
        self._held = [weakref.ref(one) if isinstance(one, torch.Tensor) else one for one in self._read_held()]
        self._places = list(self._read_places())

    def holds(self) -> bool:
        """Whether nothing changed since."""
        held = list(self._read_held())
        return (
            _are(list(self._read_values()), self._values)
            and _are(list(self._read_ways()), self._ways)
            and len(held) == len(self._held)
            and all(map(_is_what_was_held, held, self._held))
            and list(self._read_places()) == self._places
        )

    def _read_values(self) -> Iterator[Any]:
        return chain.from_iterable(
            layer.values() if _OURS.isdisjoint(layer) else [layer[name] for name in layer if not _is_ours(layer, name)]
            for layer in self._layers
        )

    def _read_ways(self) -> Iterator[Any]:
        """What classes and torch do, which some exchange for everybody: another attention, another padding."""
        yield functional.scaled_dot_product_attention
        for kind in self._kinds:
            yield from (getattr(kind, name, None) for name in ("forward", "__call__", "_conv_forward"))

    def _read_held(self) -> Iterator[Any]:
        """What is in lists and dictionaries: layers, hooks, and strengths of adapters, which are changed in place."""
        return chain(chain.from_iterable(one.values() for one in self._dicts), *self._lists)

    def _read_places(self) -> Iterator[Any]:
        """Where each weight lies, and how."""
        kept = chain.from_iterable(weights.values() for weights in self._weights)
        return ((weight.data_ptr(), weight.stride()) for weight in kept if weight is not None)


def _is_ours(layer: dict[str, Any], name: str) -> bool:
    return name in _OURS and (name != "forward" or is_our_forward(layer[name]))


def is_our_forward(forward: Any) -> bool:
    """Whether what stands in for a layer's forward was put there by this package."""
    code = getattr(forward, "__func__", type(forward))
    return str(code.__module__).startswith("anyaccel.")


def _are(seen: list[Any], kept: list[Any]) -> bool:
    """Whether these are the same objects, and as many."""
    return len(seen) == len(kept) and all(map(is_, seen, kept))


def _is_what_was_held(seen: Any, kept: Any) -> bool:
    """Of a tensor no more than a weak reference is kept, so that its memory does not stay."""
    return seen is kept or (type(kept) is weakref.ref and kept() is seen)
