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
_WEIGHTS = ("_parameters", "_buffers")


class Snapshot:
    """What a model was when this was made."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._layers = [part.__dict__ for part in module.modules()]
        processors = [vars(one) for layer in self._layers if hasattr(one := layer.get("processor"), "__dict__")]
        owned = [pair for owner in (*self._layers, *processors) for pair in owner.items()]
        self._lists = [value for _, value in owned if type(value) is list]
        self._dicts = [*processors, *(value for name, value in owned if type(value) is dict and name not in _WEIGHTS)]
        self._weights = [layer[name] for layer in self._layers for name in _WEIGHTS]
        self._values, self._held = list(self._read_values()), list(self._read_held())
        self._places = list(self._read_places())

    def holds(self) -> bool:
        """Whether nothing changed since."""
        return (
            _are(self._read_values(), self._values)
            and _are(self._read_held(), self._held)
            and list(self._read_places()) == self._places
        )

    def _read_values(self) -> Iterator[Any]:
        return chain.from_iterable(
            layer.values() if _OURS.isdisjoint(layer) else [layer[name] for name in layer if name not in _OURS]
            for layer in self._layers
        )

    def _read_held(self) -> Iterator[Any]:
        """What is in lists and dictionaries: layers, and strengths of adapters, which are changed in place."""
        held = chain(chain.from_iterable(one.values() for one in self._dicts), *self._lists)
        return (one for one in held if not isinstance(one, torch.Tensor))  # whose memory would stay

    def _read_places(self) -> Iterator[int]:
        """Where each weight lies."""
        kept = chain.from_iterable(weights.values() for weights in self._weights)
        return (weight.data_ptr() for weight in kept if weight is not None)


def _are(found: Iterator[Any], kept: list[Any]) -> bool:
    """Whether these are the same objects, and as many."""
    seen = list(found)
    return len(seen) == len(kept) and all(map(is_, seen, kept))
