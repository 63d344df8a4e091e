"""Generators for virtual devices: CPU generators that report the virtual device and draw other values for a seed."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.torch_patch_registry import apply_patch, replace_class
from anyaccel.upstream.torch_internals import PlainGenerator, read_address

__all__ = ["find_generator_device", "install_generator"]

# Device of each virtual generator by its C++ address; the dispatcher passes a plain generator, not the subclass.
_DEVICES: dict[int, torch.device] = {}
# Changes the low 32 bits of each seed: every real device draws other values than the CPU for the same seed.
_SEED_MASK = 0x5BD1E995


class VirtualGenerator(PlainGenerator):
    """A CPU generator that reports a virtual device."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The virtual device that the generator belongs to."""
        return _DEVICES[read_address(self)]

    def manual_seed(self, seed: int) -> VirtualGenerator:
        """Seed the generator, which then draws other values than a CPU generator with this seed."""
        super().manual_seed(seed ^ _SEED_MASK)
        return self

    def initial_seed(self) -> int:
        """Return the seed that the generator was created or last seeded with."""
        return super().initial_seed() ^ _SEED_MASK

    def __reduce__(self) -> Any:
        return _rebuild_generator, (str(self.device), self.get_state())

    def clone_state(self) -> VirtualGenerator:
        """Return a generator on the same device with the same state."""
        return _make_generator(self.device, self.get_state())

    def __deepcopy__(self, memo: dict[int, Any]) -> VirtualGenerator:
        return _make_generator(self.device, self.get_state())


def find_generator_device(generator: torch.Generator) -> torch.device:
    """Return a generator's device, whether virtual or real."""
    return _DEVICES.get(read_address(generator)) or generator.device


def _make_generator(device: torch.device, state: torch.Tensor | None = None) -> VirtualGenerator:
    generator = VirtualGenerator()
    _DEVICES[read_address(generator)] = device
    # C++ reuses addresses: a stale entry would give a later CPU generator the wrong device.
    weakref.finalize(generator, _DEVICES.pop, read_address(generator), None)
    if state is None:
        generator.manual_seed(PlainGenerator().initial_seed())
    else:
        generator.set_state(state)
    return generator


def _rebuild_generator(device: str, state: torch.Tensor) -> torch.Generator:
    """Recreate a pickled generator from its device and RNG state."""
    return _make_generator(torch.device(device), state)


def install_generator(accelerator: VirtualAccelerator) -> None:
    """Make `torch.Generator(device)` return a virtual generator if the device is virtual."""

    def replace(original: Any) -> Any:
        def build(device: Any = "cpu") -> Any:
            parsed = torch.device(device)
            if parsed.type != accelerator.name:
                return original(parsed)
            # A device without a random number generator fails here, before the first draw.
            if accelerator.enforcing and accelerator.limits.random is not None:
                accelerator.hit_limit("random_numbers", accelerator.limits.random, "torch.Generator")
            return _make_generator(parsed if parsed.index is not None else accelerator.device())

        return replace_class(original, build)

    apply_patch("torch.Generator", replace, "emulator")
