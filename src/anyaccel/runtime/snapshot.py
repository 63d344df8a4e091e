"""A snapshot of a model: whether it is still what it was, told in about a millisecond.

What was recorded or kept for a model holds for as long as its weights lie where they lay and every attribute of its
layers, and of what attends for them, is the object that it was. This is looked at before every picture, while the
device waits, so that nothing is built here that would be collected.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import is_
from typing import Any

import torch

__all__ = ["Snapshot"]

_OURS = frozenset(("forward", "_anyaccel_boundary"))
"""What is put on layers here, and changes with plans."""


class Snapshot:
    """What a model was when this was made."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._layers = [part.__dict__ for part in module.modules()]
        self._values, self._children = list(self._read_values()), list(self._read_children())
        self._places, self._adapters = list(self._read_places()), list(self._read_adapters())

    def holds(self) -> bool:
        """Whether nothing changed since."""
        return (
            _are(self._read_children(), self._children)
            and _are(self._read_values(), self._values)
            and list(self._read_places()) == self._places
            and list(self._read_adapters()) == self._adapters
        )

    def _read_values(self) -> Iterator[Any]:
        own = chain.from_iterable(
            layer.values() if _OURS.isdisjoint(layer) else [layer[name] for name in layer if name not in _OURS]
            for layer in self._layers
        )
        processors = (layer["processor"] for layer in self._layers if hasattr(layer.get("processor"), "__dict__"))
        return _look_inside(chain(own, chain.from_iterable(vars(one).values() for one in processors)))

    def _read_children(self) -> Iterator[Any]:
        return chain.from_iterable(layer["_modules"].values() for layer in self._layers)

    def _read_places(self) -> Iterator[int]:
        """Where each weight lies."""
        kept = chain.from_iterable(
            chain(layer["_parameters"].values(), layer["_buffers"].values()) for layer in self._layers
        )
        return (parameter.data_ptr() for parameter in kept if parameter is not None)

    def _read_adapters(self) -> Iterator[Any]:
        """How strong adapters are, and which are on, which they keep inside dictionaries."""
        for layer in self._layers:
            if isinstance(layer.get("scaling"), dict):
                yield tuple(layer["scaling"].items()), tuple(layer.get("_active_adapter") or ())


def _look_inside(values: Iterator[Any]) -> Iterator[Any]:
    """These, and what lists and dictionaries among them hold: the strengths of adapters are changed in place."""
    for value in values:
        yield value
        kind = type(value)
        if kind is list or kind is tuple:
            yield from (one for one in value if not isinstance(one, torch.Tensor))  # whose memory would stay
        elif kind is dict:
            yield from (one for one in value.values() if not isinstance(one, torch.Tensor))


def _are(found: Iterator[Any], kept: list[Any]) -> bool:
    """Whether these are the same objects, and as many."""
    seen = list(found)
    return len(seen) == len(kept) and all(map(is_, seen, kept))
