"""Driver base class: device operations, implemented by default with the torch device module.

A backend overrides only the methods that differ on its device. Capabilities are defined in the
sheet, not in the driver.
"""

from __future__ import annotations

import functools
import importlib
import re
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from anyaccel.backends.claim import Answer, DtypeLimit, Yes
from anyaccel.backends.dtype_probe import probe_dtype
from anyaccel.backends.out_of_memory import is_out_of_memory
from anyaccel.backends.sheet import Dtypes, Sheet
from anyaccel.errors import NotMeasurableError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from types import ModuleType

    import torch

__all__ = ["Driver", "Memory", "Recorder"]

# Captures one run of a function. Returns its result, and a function that replays the graph into the same tensors.
Record: TypeAlias = "Callable[[Callable[[], Any]], tuple[Any, Callable[[], None]]]"
# torch caches pinned memory until the process exits, so large tensors such as videos are not pinned.
_MAX_PINNED_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Memory:
    """The used, free and total memory of one device, in bytes."""

    used_bytes: int
    """Bytes of this process's tensors; on the CPU, of the whole process."""
    free_bytes: int
    """Bytes that any process can still allocate."""
    total_bytes: int
    """All bytes, or those that the system allows the device to use."""


@dataclass(frozen=True)
class Recorder:
    """A recorder that captures device operations as a replayable graph, such as a CUDA graph."""

    record: Record
    warmup_runs: int = 2
    """Warm-up runs per shape before the capture, in which libraries select kernels and allocate workspaces."""
    tolerance: float = 2e-2
    """The largest accepted relative error of the first replay against the eager result."""
    device_type: str = ""
    """The type of the devices whose operations are captured; empty if all operations are."""
    read_settings: Callable[[], Any] = lambda: None
    """Returns the global settings that are fixed at capture, such as TF32."""


class Driver:
    """Operations for the device that a sheet describes, such as synchronization and memory queries.

    By default, they are implemented with `torch.get_device_module`.
    """

    has_events = False
    """Whether the device has events and side streams, so `record_event` waits only for earlier work."""

    def __init__(self, sheet: Sheet) -> None:
        self.sheet = sheet
        self._side_streams: dict[int, Any] = {}

    def load(self) -> None:
        """Import the vendor's modules, which register the device with torch."""
        for module in self.sheet.modules:
            importlib.import_module(module)

    def module(self) -> ModuleType:
        """Return the torch module for the device type, such as `torch.xpu`."""
        import torch

        self.load()
        module: ModuleType = torch.get_device_module(self.sheet.torch_name)
        return module

    def count(self) -> int:
        """Return the number of devices of this type that this process can use."""
        module = self.module()
        return int(module.device_count()) if module.is_available() else 0

    def current_index(self) -> int:
        """Return the index of the current device, for example the one set by `torch.cuda.set_device`."""
        # Some vendors return a torch.device instead of an integer.
        current = getattr(self.module(), "current_device", lambda: 0)()
        return int(getattr(current, "index", current) or 0)

    def device_name(self, index: int) -> str:
        """Return the name that the device reports, or the sheet's title if it reports none."""
        get_name = getattr(self.module(), "get_device_name", None)
        return self.sheet.title if get_name is None else str(get_name(index))

    def product(self, index: int) -> str | None:
        """Return the product name that matches the name reported by the device, or None."""
        name = self.device_name(index)
        products = [p for p in self.sheet.products if p.reported_as and re.search(p.reported_as, name)]
        if len(products) > 1:
            # Products such as the RTX 4060 Ti exist with several memory sizes under the same name.
            total = self.memory(index).total_bytes
            products.sort(key=lambda product: abs((product.memory_bytes or 0) - total))
        return products[0].name if products else None

    def synchronize(self, index: int) -> None:
        """Wait until the device has finished all enqueued work."""
        self.module().synchronize(index)

    def record_event(self, index: int) -> Callable[[], None]:
        """Return a function that waits for the work enqueued before this call.

        If the device does not support events, the function waits for all enqueued work.
        """
        return functools.partial(self.synchronize, index)

    def send(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Copy a CPU tensor to the device, asynchronously if the device supports it."""
        # A non-blocking copy needs pinned memory: from pageable memory it waits for earlier work on the device.
        if not self.has_events or not _can_be_pinned(tensor) or tensor.nbytes > _MAX_PINNED_BYTES:
            return tensor.to(device)
        return tensor.pin_memory().to(device, non_blocking=True)

    def side_stream(self, index: int) -> AbstractContextManager[Any]:
        """Return a context manager that enqueues work on a side stream.

        This work can run concurrently with work that was enqueued earlier. If the device does not support
        side streams, the context manager does nothing.
        """
        if not self.has_events:
            return nullcontext()
        module = self.module()
        if index not in self._side_streams:
            self._side_streams[index] = module.Stream(index)
        stream: AbstractContextManager[Any] = module.stream(self._side_streams[index])
        return stream

    def empty_cache(self) -> None:
        """Release the allocator's cached memory, if the device has a caching allocator."""
        release = getattr(self.module(), "empty_cache", None)
        if release is not None:
            release()

    def manual_seed(self, seed: int) -> None:
        """Seed the CPU and every device of this type."""
        import torch

        torch.manual_seed(seed)
        module = self.module()
        seed_all = getattr(module, "manual_seed_all", None) or getattr(module, "manual_seed", None)
        if seed_all is not None:
            seed_all(seed)

    def memory(self, index: int) -> Memory:
        """Return the used, free and total memory of one device, in bytes."""
        get_info, get_used = (
            self._find_function("mem_get_info", "get_memory_info"),
            self._find_function("memory_allocated"),
        )
        free, total = get_info(index)
        return Memory(used_bytes=int(get_used(index)), free_bytes=int(free), total_bytes=int(total))

    def max_memory(self, index: int) -> int:
        """Return the peak tensor memory in bytes since the last reset."""
        return int(self._find_function("max_memory_allocated")(index))

    def reset_peak_memory(self, index: int) -> None:
        """Reset the peak tensor memory that `max_memory` returns."""
        self._find_function("reset_peak_memory_stats")(index)

    def capture(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model wrapped to run as a captured device graph; by default, raise an error.

        Drivers override this method for devices that have an execution mode with graph capture.
        """
        raise NotMeasurableError(
            f"{self.sheet.title} ({self.sheet.name}) does not support device graphs",
            hint="use a mode without device graphs, for example mode='eager'",
        )

    def recorder(self, index: int) -> Recorder | None:
        """Return a recorder that captures device graphs, or None if the device does not support them."""
        return None

    def resolve_conditions(self, device: torch.device) -> Sheet:
        """Return the sheet with uncertain dtype limits replaced by the results of probing the device.

        A limit is uncertain if it has unresolved conditions or its sources contradict each other.
        """
        # Slow dtypes are not probed, because a correct result says nothing about time. Neither is fp8, which supports
        # storage and scaled products but not the addition of the probe.
        dtypes = self.sheet.dtypes
        changes: dict[str, Answer] = {
            field.name: _probe(field.name, answer, device)
            for field in fields(Dtypes)
            if isinstance(answer := getattr(dtypes, field.name), DtypeLimit)
            and answer.effect != "slow"
            and not field.name.startswith("float8")
            and (answer.conditional or answer.contradicted_by)
        }
        return replace(self.sheet, dtypes=replace(dtypes, **changes)) if changes else self.sheet

    def _find_function(self, name: str, accelerator_name: str | None = None) -> Any:
        """Return a memory function from the device module or `torch.accelerator`; raise if neither has it."""
        import torch

        own = getattr(self.module(), name, None)
        if own is not None:
            return own
        current = torch.accelerator.current_accelerator()
        shared = getattr(torch.accelerator, accelerator_name or name, None)
        if shared is not None and current is not None and current.type == self.sheet.torch_name:
            return shared
        raise NotMeasurableError(
            f"{self.sheet.title} ({self.sheet.name}) does not report its memory usage: "
            f"neither torch.{self.sheet.torch_name} nor torch.accelerator in torch {torch.__version__} provides {name}",
            hint="upgrade to torch 2.9 or later, which adds memory statistics to torch.accelerator",
        )


def _probe(dtype: str, doubted: DtypeLimit, device: torch.device) -> Answer:
    try:
        effect = probe_dtype(dtype, device)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return doubted  # a full device cannot be probed: the sheet stays as it is
    says = f"Probed on {device}: {dtype} {'is correct' if effect is None else f'gives {effect}'}."
    if effect is None:
        return Yes(says=says, source=doubted.source, evidence="hardware")
    return replace(doubted, says=says, effect=effect, evidence="hardware", only_on=(), only_if=())


def _can_be_pinned(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is plain, dense, and not expanded: the elements of such a one share memory."""
    import torch

    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return is_plain and not (0 in tensor.stride() and tensor.numel() > 1)
