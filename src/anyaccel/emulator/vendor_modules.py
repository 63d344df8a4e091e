"""Emulated vendor packages: a device's `torch.NAME` module and the packages that provide it."""

from __future__ import annotations

import importlib.machinery
import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from anyaccel.emulator.streams import make_stream_classes
from anyaccel.emulator.torch_npu_functions import ASCEND_KERNELS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anyaccel.emulator.accelerator import VirtualAccelerator

__all__ = ["install_package", "install_vendor_packages", "make_device_module"]

# Functions of a vendor package that programs call by name.
_KERNELS: dict[str, dict[str, Any]] = {"torch_npu": ASCEND_KERNELS}
# Vendor-specific functions of the device module, by package.
_FUNCTIONS: dict[str, dict[str, Any]] = {
    # Graph capture has no effect on results: the module runs as is.
    "habana_frameworks.torch": {"wrap_in_hpu_graph": lambda module, *args, **kwargs: module}
}

# Capacity that a device reports if none is configured.
UNLIMITED_BYTES = 64 * 2**30


def make_device_module(accelerator: VirtualAccelerator) -> ModuleType:
    """Return the `torch.NAME` module as the vendor's package would provide it."""
    module = ModuleType(f"torch.{accelerator.name}", "Functions of a virtual accelerator.")
    # Libraries probe for packages with importlib.util.find_spec, which raises ValueError without a spec.
    module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
    groups = [
        _make_device_functions(accelerator),
        _make_random_functions(accelerator),
        _make_memory_functions(accelerator),
    ]
    for functions in groups:
        vars(module).update(functions)
    return module


def _index_of(accelerator: VirtualAccelerator, device: Any = None) -> int:
    """Return the index of a device given as an index, name or `torch.device`; None is the current device."""
    if device is None:
        return accelerator.current_index
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return accelerator.current_index if index is None else index


def _make_device_functions(accelerator: VirtualAccelerator) -> dict[str, Any]:
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

    def do_nothing(*args: Any, **kwargs: Any) -> None:
        """Do nothing: the device is synchronous and has no cache."""

    name = f"virtual {accelerator.sheet.title}"
    stream, event = make_stream_classes(do_nothing)
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "_is_compiled": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": do_nothing,
        "init": do_nothing,
        "synchronize": do_nothing,
        "empty_cache": do_nothing,
        "device_count": lambda: accelerator.count,
        "current_device": lambda: accelerator.current_index,
        "set_device": set_device,
        "device": on_device,
        "get_device_name": lambda device=None: name,
        # With (0, 0), programs skip features that require a CUDA compute capability.
        "get_device_capability": lambda device=None: (0, 0),
        "get_device_properties": lambda device=None: SimpleNamespace(
            name=name, total_memory=_find_capacity(accelerator)
        ),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "Stream": stream,
        "Event": event,
        "current_stream": lambda device=None: stream(accelerator.device(_index_of(accelerator, device))),
        "default_stream": lambda device=None: stream(accelerator.device(_index_of(accelerator, device))),
        "stream": lambda stream: stream,
    }


def _make_random_functions(accelerator: VirtualAccelerator) -> dict[str, Any]:
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


def _make_memory_functions(accelerator: VirtualAccelerator) -> dict[str, Any]:
    memory = accelerator.memory

    def used(device: Any = None) -> int:
        return memory.used(_index_of(accelerator, device))

    def peak(device: Any = None) -> int:
        return memory.peak(_index_of(accelerator, device))

    def info(device: Any = None) -> tuple[int, int]:
        return _find_capacity(accelerator) - used(device), _find_capacity(accelerator)

    return {
        "memory_allocated": used,
        # There is no caching allocator, so reserved and allocated memory are the same.
        "memory_reserved": used,
        "current_allocated_memory": used,
        "driver_allocated_memory": used,
        "max_memory_allocated": peak,
        "max_memory_reserved": peak,
        "mem_get_info": info,
        "recommended_max_memory": lambda: _find_capacity(accelerator),
        "reset_peak_memory_stats": lambda device=None: memory.reset_peak(_index_of(accelerator, device)),
        "reset_max_memory_allocated": lambda device=None: memory.reset_peak(_index_of(accelerator, device)),
        "memory_stats": lambda device=None: {
            "allocated_bytes.all.current": used(device),
            "allocated_bytes.all.peak": peak(device),
            "InUse": used(device),
            "MaxInUse": peak(device),
            "Limit": _find_capacity(accelerator),
        },
    }


def _find_capacity(accelerator: VirtualAccelerator) -> int:
    return accelerator.capacity_bytes or UNLIMITED_BYTES


def install_vendor_packages(accelerator: VirtualAccelerator, module: ModuleType) -> None:
    """Make the vendor packages that the sheet names importable, with the functions that programs use."""
    for dotted in accelerator.sheet.modules:
        vars(module).update(_FUNCTIONS.get(dotted, {}))
        install_package(dotted)
        package = sys.modules[dotted]
        vars(package).update({accelerator.name: module, "__version__": "0.0.0+virtual"})
        for attribute, value in vars(module).items():
            # Older releases have the functions on the package itself (torch_npu.empty_cache).
            if not attribute.startswith("__"):
                setattr(package, attribute, value)
        vars(package).update(_KERNELS.get(dotted, {}))
        _install(f"{dotted}.{accelerator.name}", module)


def install_package(dotted: str) -> None:
    """Make an empty package importable, along with its parent packages."""
    parts = dotted.split(".")
    for depth in range(1, len(parts) + 1):
        _install(".".join(parts[:depth]))


def _install(dotted: str, module: ModuleType | None = None) -> None:
    """Make a module importable as `dotted`; if `module` is None, create an empty package."""
    if dotted in sys.modules:
        return
    package = module or ModuleType(dotted, "Emulated package of a vendor, for a virtual accelerator.")
    if module is None:
        package.__spec__ = importlib.machinery.ModuleSpec(dotted, None, is_package=True)
        package.__path__ = []
    sys.modules[dotted] = package
    parent, _, child = dotted.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, package)
