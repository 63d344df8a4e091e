"""The stand-in: torch's module of CUDA, which tells a script of the device that is here.

Libraries that know of devices themselves still meet the module as it is: what it says to them is the truth.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from anyaccel.backends.claim import Limit
from anyaccel.backends.torch_device import is_host
from anyaccel.cuda_scripts.migration import Migration, is_device_aware_library, read_site
from anyaccel.emulator.streams import make_stream_classes
from anyaccel.emulator.torch_patches import apply_patch, replace_by
from anyaccel.errors import NotMeasurableError, UnmappedError

__all__ = ["CudaModuleProxy", "install_cuda_proxy"]

_GRAPH = "a recorded graph of launches is a thing of NVIDIA's driver"
_REASONS = {
    "CUDAGraph": _GRAPH,
    "graph": _GRAPH,
    "graphs": _GRAPH,
    "make_graphed_callables": _GRAPH,
    "graph_pool_handle": _GRAPH,
    "nccl": "it is NVIDIA's library between cards; torch.distributed takes each device's own",
    "comm": "it is NVIDIA's library between cards; torch.distributed takes each device's own",
    "cudart": "these are functions of NVIDIA's runtime",
    "jiterator": "it compiles kernels that are written in CUDA",
    "ExternalStream": "it is a stream of NVIDIA's runtime",
    "MemPool": "the allocator is NVIDIA's",
    "CUDAPluggableAllocator": "the allocator is NVIDIA's",
}
_NO_FIGURE = float("nan")


class CudaModuleProxy:
    """Every name of the module that a script may use, answered for the device; methods are called as in torch."""

    def __init__(self, migration: Migration, module: ModuleType) -> None:
        self._migration, self._driver = migration, migration.opened.driver
        self.amp = vars(module)["amp"]
        self.OutOfMemoryError = torch.OutOfMemoryError
        self.AcceleratorError = RuntimeError
        self.Stream, self.Event = make_stream_classes(lambda: self.synchronize())
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
        """Nothing of it is needed here."""

    @property
    def nvtx(self) -> Any:
        """Marks for NVIDIA's profiler: no result depends on one, and they are left out."""
        self._migration.note("marks for NVIDIA's profiler are left out")
        nothing = self._do_nothing
        return SimpleNamespace(range_push=nothing, range_pop=nothing, mark=nothing, range=lambda *a, **k: nullcontext())

    def _index(self, device: Any = None) -> int:
        if device is None:
            return self._migration.device.index or 0
        return self._migration.find(device, "its argument").index or 0

    def is_available(self) -> bool:
        """There is an accelerator, though it has another name."""
        return True

    is_initialized = is_available

    def device_count(self) -> int:
        """How many devices there are from the chosen one on."""
        return max(1, self._driver.count() - (self._migration.first.index or 0))

    def current_device(self) -> int:
        """The number of the current device, counted from the chosen one."""
        return (self._migration.device.index or 0) - (self._migration.first.index or 0)

    def set_device(self, device: Any) -> None:
        """Make another device the one that a name without a number means."""
        self._migration.device = self._migration.translate(device, "set_device")

    @contextmanager
    def device(self, device: Any = None) -> Iterator[None]:
        """Make a device the current one while the block runs."""
        before = self._migration.device
        ignored = device < 0 if isinstance(device, int) else device is None or is_host(device)
        if not ignored:
            self._migration.device = self._migration.translate(device, "device")
        try:
            yield
        finally:
            self._migration.device = before

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        """The work of the block, in its order."""
        yield

    def synchronize(self, device: Any = None) -> None:
        """Wait for the device."""
        self._driver.synchronize(self._index(device))

    def empty_cache(self) -> None:
        """Give cached memory back."""
        self._driver.empty_cache()

    def get_device_name(self, device: Any = None) -> str:
        """What the device calls itself."""
        return self._driver.device_name(self._index(device))

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        """No number of a compute capability is like this device, and so the lowest is said."""
        self._migration.note("no compute capability is like this device's, and (0, 0) was answered")
        return (0, 0)

    def get_device_properties(self, device: Any = None) -> Any:
        """What is known of the device, by the names that scripts ask for."""
        major, minor = self.get_device_capability()
        total = self._read(lambda: self._driver.memory(self._index(device)).total_bytes)
        name = self.get_device_name(device)
        return SimpleNamespace(name=name, total_memory=total, major=major, minor=minor, is_integrated=False)

    def get_arch_list(self) -> list[str]:
        """No architecture of NVIDIA's is here."""
        return []

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        """Whether the sheet lets bfloat16 be used."""
        answer = self._migration.opened.sheet.dtype("bfloat16")
        return not (isinstance(answer, Limit) and answer.effect in ("error", "wrong"))

    def is_current_stream_capturing(self) -> bool:
        """No stream is recorded."""
        return False

    def manual_seed(self, seed: int) -> None:
        """Seed the host, where all noise is drawn, and the device."""
        self._driver.manual_seed(int(seed))

    def seed(self) -> None:
        """Seed by chance."""
        self._driver.manual_seed(torch.seed() % 2**63)

    seed_all = seed

    def initial_seed(self) -> int:
        """What was seeded."""
        return torch.initial_seed()

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """The state of the noise, which is the host's."""
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        """Set the state of the noise."""
        torch.set_rng_state(state)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        """The state of the noise, once for each device."""
        return [torch.get_rng_state()] * self.device_count()

    def set_rng_state_all(self, states: Any) -> None:
        """Set the state of the noise."""
        torch.set_rng_state(next(iter(states)))

    def _read(self, figure: Any) -> Any:
        """A figure of the device; where it keeps none, what is not a number, so that a print of it goes on."""
        try:
            return figure()
        except NotMeasurableError as error:
            self._migration.note(f"{error.message}; nan was answered")
            return _NO_FIGURE

    def memory_allocated(self, device: Any = None) -> Any:
        """Bytes that tensors hold."""
        return self._read(lambda: self._driver.memory(self._index(device)).used_bytes)

    def max_memory_allocated(self, device: Any = None) -> Any:
        """The most bytes that tensors held at once."""
        return self._read(lambda: self._driver.max_memory(self._index(device)))

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Count the most anew."""
        self._read(lambda: self._driver.reset_peak_memory(self._index(device)))

    def mem_get_info(self, device: Any = None) -> tuple[Any, Any]:
        """Free and total bytes."""
        found = self._read(lambda: self._driver.memory(self._index(device)))
        return (_NO_FIGURE, _NO_FIGURE) if found is _NO_FIGURE else (found.free_bytes, found.total_bytes)

    def memory_stats(self, device: Any = None) -> dict[str, Any]:
        """The figures that the device keeps, by the names that scripts ask for."""
        used, peak = self.memory_allocated(device), self.max_memory_allocated(device)
        return {
            f"{kind}_bytes.all.{moment}": figure
            for kind in ("allocated", "reserved", "active")
            for moment, figure in (("current", used), ("peak", peak))
        }

    def memory_summary(self, device: Any = None, abbreviated: bool = False) -> str:
        """The figures in words."""
        used, peak = self.memory_allocated(device), self.max_memory_allocated(device)
        return f"{self._migration.title}: {used} bytes, at most {peak}"


def install_cuda_proxy(migration: Migration) -> None:
    """Let a script meet the answers where it looks for torch's module of CUDA."""
    module: Any = torch.get_device_module(migration.foreign)
    answers = CudaModuleProxy(migration, module)

    class StandIn(ModuleType):
        """The module: as it is for libraries, the answers for scripts."""

        def __getattribute__(self, name: str) -> Any:
            if name.startswith("__") or is_device_aware_library(sys._getframe(1)):
                return super().__getattribute__(name)
            spelled = f"{module_name}.{name}"
            if name.startswith("_") or not hasattr(answers, name):
                raise _make_refusal(migration, spelled, name)
            migration.record(spelled)
            return getattr(answers, name)

    module_name = module.__name__
    apply_patch(f"{module_name}.__class__", replace_by(StandIn), "scripts")


def _make_refusal(migration: Migration, spelled: str, name: str) -> UnmappedError:
    reason = _REASONS.get(name, "nothing on another device is known to mean the same")
    return UnmappedError(
        f"{read_site()}: {spelled} cannot be mapped to {migration.title}: {reason}",
        hint="leave it out where the device is another one; if it has a meaning there, an issue with the line helps us",
    )
