"""Proxy for torch's CUDA module that maps a script's calls to the actual device.

Libraries that support multiple devices (diffusers, accelerate) still use the real module.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from anyaccel.backends.claim import Limit
from anyaccel.backends.device_type_checks import is_host
from anyaccel.cuda_scripts.migration import Migration, is_device_aware_library, read_site
from anyaccel.emulator.streams import make_stream_classes
from anyaccel.emulator.torch_patch_registry import apply_patch, replace_by
from anyaccel.errors import NotMeasurableError, UnmappedError

__all__ = ["CudaModuleProxy", "install_cuda_proxy"]

_GRAPH = "CUDA graphs require an NVIDIA driver"
# Why a function has no equivalent on other devices, for the error text.
_REASONS = {
    "CUDAGraph": _GRAPH,
    "graph": _GRAPH,
    "graphs": _GRAPH,
    "make_graphed_callables": _GRAPH,
    "graph_pool_handle": _GRAPH,
    "nccl": "NCCL is NVIDIA's communication library; use torch.distributed",
    "comm": "NCCL is NVIDIA's communication library; use torch.distributed",
    "cudart": "it calls the CUDA runtime",
    "jiterator": "it compiles CUDA kernels",
    "ExternalStream": "it wraps a CUDA stream",
    "MemPool": "it configures the CUDA allocator",
    "CUDAPluggableAllocator": "it configures the CUDA allocator",
}
# The value of a statistic that the device does not report. Formatting and arithmetic work with NaN, not with None.
_NOT_REPORTED = float("nan")


class CudaModuleProxy:
    """Functions of torch's CUDA module that scripts use, implemented for the actual device."""

    def __init__(self, migration: Migration, module: ModuleType) -> None:
        self._migration, self._driver = migration, migration.opened.driver
        self.amp = vars(module)["amp"]
        self.OutOfMemoryError = torch.OutOfMemoryError
        self.AcceleratorError = RuntimeError
        self.Stream, self.Event = make_stream_classes(lambda: self.synchronize())
        # The submodules `memory` and `random` have the same functions as the module itself.
        self.memory = self.random = self
        nothing = self._do_nothing
        self.ipc_collect = self.init = nothing
        self.set_per_process_memory_fraction = self.set_sync_debug_mode = nothing
        self.reset_max_memory_allocated = self.reset_max_memory_cached = self.reset_peak_memory_stats
        self.manual_seed_all = self.manual_seed
        self.memory_reserved = self.memory_cached = self.memory_allocated
        self.max_memory_reserved = self.max_memory_cached = self.max_memory_allocated
        self.current_stream = self.default_stream = self.Stream

    def _do_nothing(self, *args: Any, **kwargs: Any) -> None:
        """Accept any arguments and do nothing, for functions that have no effect on the actual device."""

    @property
    def nvtx(self) -> Any:
        """Stub for the NVTX module: its functions do nothing, because only NVIDIA's profiler uses them."""
        self._migration.note("NVTX markers are ignored: they are only for NVIDIA's profiler")
        nothing = self._do_nothing
        return SimpleNamespace(range_push=nothing, range_pop=nothing, mark=nothing, range=lambda *a, **k: nullcontext())

    def _index(self, device: Any = None) -> int:
        if device is None:
            return self._migration.device.index or 0
        return self._migration.map_device(device, "device argument").index or 0

    def is_available(self) -> bool:
        """Return True, because scripts use this to choose between the accelerator and the CPU."""
        return True

    is_initialized = is_available

    # Indices are relative to the selected device, like CUDA_VISIBLE_DEVICES.
    def device_count(self) -> int:
        """Return the number of devices visible to the script, starting with the one set by `--device`."""
        return max(1, self._driver.count() - (self._migration.first.index or 0))

    def current_device(self) -> int:
        """Return the index of the current device, counted from the one set by `--device`."""
        return (self._migration.device.index or 0) - (self._migration.first.index or 0)

    def set_device(self, device: Any) -> None:
        """Set the current device, which `cuda` without an index refers to."""
        self._migration.device = self._migration.translate(device, "set_device")

    @contextmanager
    def device(self, device: Any = None) -> Iterator[None]:
        """Set the current device inside the `with` block."""
        before = self._migration.device
        # Like torch, ignore None and negative indices.
        ignored = device < 0 if isinstance(device, int) else device is None or is_host(device)
        if not ignored:
            self._migration.device = self._migration.translate(device, "device")
        try:
            yield
        finally:
            self._migration.device = before

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        """Run the `with` block without switching streams, because the device has only one stream."""
        yield

    def synchronize(self, device: Any = None) -> None:
        """Wait until all work on the device is complete."""
        self._driver.synchronize(self._index(device))

    def empty_cache(self) -> None:
        """Release unused cached memory on the device."""
        self._driver.empty_cache()

    def get_device_name(self, device: Any = None) -> str:
        """Return the name of the device."""
        return self._driver.device_name(self._index(device))

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        """Return (0, 0), the lowest compute capability, so that scripts skip CUDA-specific features."""
        self._migration.note("get_device_capability returned (0, 0): the device has no CUDA compute capability")
        return (0, 0)

    def get_device_properties(self, device: Any = None) -> Any:
        """Return the device's name, total memory and a compute capability of (0, 0)."""
        major, minor = self.get_device_capability()
        total = self._read(lambda: self._driver.memory(self._index(device)).total_bytes)
        name = self.get_device_name(device)
        return SimpleNamespace(name=name, total_memory=total, major=major, minor=minor, is_integrated=False)

    def get_arch_list(self) -> list[str]:
        """Return an empty list, because the device has no NVIDIA architecture."""
        return []

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        """Return whether the device supports bfloat16, according to its sheet."""
        claim = self._migration.opened.sheet.dtype("bfloat16")
        return not (isinstance(claim, Limit) and claim.effect in ("error", "wrong"))

    def is_current_stream_capturing(self) -> bool:
        """Return False, because CUDA graph capture is not supported."""
        return False

    def manual_seed(self, seed: int) -> None:
        """Seed the CPU generator, which is used for all noise, and the device's generator."""
        self._driver.manual_seed(int(seed))

    def seed(self) -> None:
        """Seed the CPU generator and the device's generator with a random seed."""
        self._driver.manual_seed(torch.seed() % 2**63)

    seed_all = seed

    def initial_seed(self) -> int:
        """Return the seed of the CPU generator, which is used for all noise."""
        return torch.initial_seed()

    # One random state for all devices: a seed gives the same image on each of them.
    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """Return the RNG state of the CPU, which generates all noise."""
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        """Set the RNG state of the CPU, which generates all noise; `device` is ignored."""
        torch.set_rng_state(state)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        """Return a list with one copy of the CPU's RNG state for each device."""
        return [torch.get_rng_state()] * self.device_count()

    def set_rng_state_all(self, states: Any) -> None:
        """Set the CPU's RNG state to the first state in `states`."""
        torch.set_rng_state(next(iter(states)))

    def _read(self, read_statistic: Any) -> Any:
        """Call `read_statistic` and return its result, or NaN if the device does not report the statistic."""
        try:
            return read_statistic()
        except NotMeasurableError as error:
            self._migration.note(f"{error.message}; returned NaN")
            return _NOT_REPORTED

    def memory_allocated(self, device: Any = None) -> Any:
        """Return the number of bytes in use on the device, or NaN if the device does not report it."""
        return self._read(lambda: self._driver.memory(self._index(device)).used_bytes)

    def max_memory_allocated(self, device: Any = None) -> Any:
        """Return the peak number of bytes in use on the device, or NaN if the device does not report it."""
        return self._read(lambda: self._driver.max_memory(self._index(device)))

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Reset the peak memory statistics."""
        self._read(lambda: self._driver.reset_peak_memory(self._index(device)))

    def mem_get_info(self, device: Any = None) -> tuple[Any, Any]:
        """Return the free and total device memory in bytes, or NaN for both if they are not reported."""
        memory = self._read(lambda: self._driver.memory(self._index(device)))
        return (_NOT_REPORTED, _NOT_REPORTED) if memory is _NOT_REPORTED else (memory.free_bytes, memory.total_bytes)

    def memory_stats(self, device: Any = None) -> dict[str, Any]:
        """Return the current and peak memory use under PyTorch's keys, such as `allocated_bytes.all.peak`."""
        used, peak = self.memory_allocated(device), self.max_memory_allocated(device)
        return {
            f"{kind}_bytes.all.{moment}": size
            for kind in ("allocated", "reserved", "active")
            for moment, size in (("current", used), ("peak", peak))
        }

    def memory_summary(self, device: Any = None, abbreviated: bool = False) -> str:
        """Return the current and peak memory use as text."""
        used, peak = self.memory_allocated(device), self.max_memory_allocated(device)
        return f"{self._migration.title}: {used} bytes in use, peak {peak}"


def install_cuda_proxy(migration: Migration) -> None:
    """Make scripts use the proxy instead of torch's CUDA module; libraries still use the real module."""
    module: Any = torch.get_device_module(migration.source_type)
    proxy = CudaModuleProxy(migration, module)

    # A new class instead of a new module: scripts and libraries may already hold the module object.
    class PatchedCudaModule(ModuleType):
        """Module class that gives scripts the proxy's attributes and libraries the real ones."""

        def __getattribute__(self, name: str) -> Any:
            # The caller decides: diffusers needs the real CUDA module, the script the proxy.
            if name.startswith("__") or is_device_aware_library(sys._getframe(1)):
                return super().__getattribute__(name)
            dotted = f"{module_name}.{name}"
            if name.startswith("_") or not hasattr(proxy, name):
                raise _make_unmapped_error(migration, dotted, name)
            migration.record(dotted)
            return getattr(proxy, name)

    module_name = module.__name__
    apply_patch(f"{module_name}.__class__", replace_by(PatchedCudaModule), "scripts")


def _make_unmapped_error(migration: Migration, dotted: str, name: str) -> UnmappedError:
    reason = _REASONS.get(name, "other devices have no equivalent")
    return UnmappedError(
        f"{read_site()}: {dotted} cannot be mapped to {migration.title}: {reason}",
        hint=f"guard the call with `if hasattr({dotted.rpartition('.')[0]}, {name!r}):`; "
        "if the device has an equivalent, please open an issue that quotes this line",
    )
