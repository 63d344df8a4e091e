"""What vendors' software looks like from Python: `torch.NAME` for every device, and the packages that bring it."""

from __future__ import annotations

import importlib.machinery
import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from anyaccel.emulator.ascend_kernels import ASCEND_KERNELS
from anyaccel.emulator.streams import make_stream_classes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anyaccel.emulator.accelerator import VirtualAccelerator

__all__ = ["install_package", "install_vendor_packages", "make_device_module"]

_KERNELS: dict[str, dict[str, Any]] = {"torch_npu": ASCEND_KERNELS}
"""What a package has beside the device's module, where programs call it by name."""
_FUNCTIONS: dict[str, dict[str, Any]] = {
    # A graph runs operation by operation here, as it would without one.
    "habana_frameworks.torch": {"wrap_in_hpu_graph": lambda module, *args, **kwargs: module}
}
"""What the device's module has besides, by the package that brings it."""

UNLIMITED_BYTES = 64 * 2**30
"""What a device without a named capacity says that it has."""


def make_device_module(accelerator: VirtualAccelerator) -> ModuleType:
    """`torch.NAME` as the vendor's package would bring it."""
    module = ModuleType(f"torch.{accelerator.name}", "A virtual accelerator's own module.")
    module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
    parts = [_presence(accelerator), _seeding(accelerator), _counting(accelerator)]
    for functions in parts:
        vars(module).update(functions)
    return module


def _index_of(accelerator: VirtualAccelerator, device: Any = None) -> int:
    """The number of a device as programs give it: a number, a name, a device, or nothing for the current one."""
    if device is None:
        return accelerator.current_index
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return accelerator.current_index if index is None else index


def _presence(accelerator: VirtualAccelerator) -> dict[str, Any]:
    def set_device(device: Any) -> None:
        accelerator.current_index = accelerator.check_index(_index_of(accelerator, device))

    @contextmanager
    def on_device(device: Any = None) -> Iterator[None]:
        before = accelerator.current_index
        set_device(_index_of(accelerator, device))
        try:
            yield
        finally:
            accelerator.current_index = before

    def nothing(*args: Any, **kwargs: Any) -> None:
        """Nothing to wait for, to start or to release."""

    name = f"virtual {accelerator.sheet.title}"
    stream, event = make_stream_classes(nothing)
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "_is_compiled": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": nothing,
        "init": nothing,
        "synchronize": nothing,
        "empty_cache": nothing,
        "device_count": lambda: accelerator.count,
        "current_device": lambda: accelerator.current_index,
        "set_device": set_device,
        "device": on_device,
        "get_device_name": lambda device=None: name,
        "get_device_capability": lambda device=None: (0, 0),
        "get_device_properties": lambda device=None: SimpleNamespace(name=name, total_memory=_capacity(accelerator)),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "Stream": stream,
        "Event": event,
        "current_stream": lambda device=None: stream(accelerator.device(_index_of(accelerator, device))),
        "default_stream": lambda device=None: stream(accelerator.device(_index_of(accelerator, device))),
        "stream": lambda stream: stream,
    }


def _seeding(accelerator: VirtualAccelerator) -> dict[str, Any]:
    def manual_seed_all(seed: int) -> None:
        for generator in accelerator.generators:
            generator.manual_seed(seed)

    def manual_seed(seed: int) -> None:
        accelerator.generators[accelerator.current_index].manual_seed(seed)

    def get_rng_state(device: Any = None) -> torch.Tensor:
        return accelerator.generators[_index_of(accelerator, device)].get_state()

    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        accelerator.generators[_index_of(accelerator, device)].set_state(state)

    return {
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed_all,
        "seed": lambda: accelerator.generators[accelerator.current_index].seed(),
        "initial_seed": lambda: accelerator.generators[accelerator.current_index].initial_seed(),
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "get_rng_state_all": lambda: [generator.get_state() for generator in accelerator.generators],
        "default_generators": tuple(accelerator.generators),
    }


def _counting(accelerator: VirtualAccelerator) -> dict[str, Any]:
    book = accelerator.book

    def used(device: Any = None) -> int:
        return book.used(_index_of(accelerator, device))

    def peak(device: Any = None) -> int:
        return book.peak(_index_of(accelerator, device))

    def info(device: Any = None) -> tuple[int, int]:
        return _capacity(accelerator) - used(device), _capacity(accelerator)

    return {
        "memory_allocated": used,
        "memory_reserved": used,
        "current_allocated_memory": used,
        "driver_allocated_memory": used,
        "max_memory_allocated": peak,
        "max_memory_reserved": peak,
        "mem_get_info": info,
        "recommended_max_memory": lambda: _capacity(accelerator),
        "reset_peak_memory_stats": lambda device=None: book.reset_peak(_index_of(accelerator, device)),
        "reset_max_memory_allocated": lambda device=None: book.reset_peak(_index_of(accelerator, device)),
        "memory_stats": lambda device=None: {
            "allocated_bytes.all.current": used(device),
            "allocated_bytes.all.peak": peak(device),
            "InUse": used(device),
            "MaxInUse": peak(device),
            "Limit": _capacity(accelerator),
        },
    }


def _capacity(accelerator: VirtualAccelerator) -> int:
    return accelerator.capacity_bytes or UNLIMITED_BYTES


def install_vendor_packages(accelerator: VirtualAccelerator, module: ModuleType) -> None:
    """The packages that the sheet says bring the device, importable and empty but for what programs use of them."""
    for dotted in accelerator.sheet.modules:
        vars(module).update(_FUNCTIONS.get(dotted, {}))
        install_package(dotted)
        package = sys.modules[dotted]
        vars(package).update({accelerator.name: module, "__version__": "0.0.0+virtual"})
        for attribute, value in vars(module).items():
            if not attribute.startswith("__"):
                setattr(package, attribute, value)
        vars(package).update(_KERNELS.get(dotted, {}))
        _install(f"{dotted}.{accelerator.name}", module)


def install_package(dotted: str) -> None:
    """An empty package where `import` finds it, and those that it lies in."""
    parts = dotted.split(".")
    for depth in range(1, len(parts) + 1):
        _install(".".join(parts[:depth]))


def _install(dotted: str, module: ModuleType | None = None) -> None:
    """Put a module, or an empty package, where `import` finds it, its `__spec__` included."""
    if dotted in sys.modules:
        return
    package = module or ModuleType(dotted, "A stand-in for a vendor's package, beside a virtual accelerator.")
    if module is None:
        package.__spec__ = importlib.machinery.ModuleSpec(dotted, None, is_package=True)
        package.__path__ = []
    sys.modules[dotted] = package
    parent, _, child = dotted.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, package)
