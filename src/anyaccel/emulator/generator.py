"""Generators of a virtual device: CPU generators that say where they belong."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.torch_patches import apply_patch, replace_class
from anyaccel.upstream.torch_internals import PlainGenerator, read_address

__all__ = ["install_generator", "place_of"]

_PLACES: dict[int, torch.device] = {}
"""Where each generator of the device belongs, by its address in C++: past the dispatcher its Python class is lost."""


class VirtualGenerator(PlainGenerator):
    """A generator on a virtual device."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The virtual device."""
        return _PLACES[read_address(self)]

    def __reduce__(self) -> Any:
        return _rebuild_generator, (str(self.device), self.get_state())

    def clone_state(self) -> VirtualGenerator:
        """A generator of the same device in the same state."""
        return _make_generator(self.device, self.get_state())

    def __deepcopy__(self, memo: dict[int, Any]) -> VirtualGenerator:
        return _make_generator(self.device, self.get_state())


def place_of(generator: torch.Generator) -> torch.device:
    """The device that a generator draws on."""
    return _PLACES.get(read_address(generator)) or generator.device


def _make_generator(place: torch.device, state: torch.Tensor | None = None) -> VirtualGenerator:
    generator = VirtualGenerator()
    _PLACES[read_address(generator)] = place
    weakref.finalize(generator, _PLACES.pop, read_address(generator), None)
    if state is not None:
        generator.set_state(state)
    return generator


def _rebuild_generator(place: str, state: torch.Tensor) -> torch.Generator:
    """A generator that was pickled, with the state that it had."""
    return _make_generator(torch.device(place), state)


def install_generator(accelerator: VirtualAccelerator) -> None:
    """Let `torch.Generator("hpu")` give a generator of the virtual device; every other call is as before."""

    def replace(original: Any) -> Any:
        def build(device: Any = "cpu") -> Any:
            place = torch.device(device)
            if place.type != accelerator.name:
                return original(place)
            if accelerator.enforcing and accelerator.limits.random is not None:
                accelerator.meet("random_numbers", accelerator.limits.random, "torch.Generator")
            return _make_generator(place if place.index is not None else accelerator.device())

        return replace_class(original, build)

    apply_patch("torch.Generator", replace, "emulator")
