"""The few things that must be *done* on a device, through torch's own device modules.

A backend overrides only what differs. Nothing here decides: what a device can do is on its sheet.
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

Record: TypeAlias = "Callable[[Callable[[], Any]], tuple[Any, Callable[[], None]]]"
"""Runs a function once while the device records it; returns its result, whose tensors stay where they are, and a
function that replays the recording into them."""
_MOST_PINNED = 64 * 2**20
"""Bytes; what is pinned stays with the process, and so videos are not."""


@dataclass(frozen=True)
class Memory:
    """The memory of one device at one moment."""

    used_bytes: int
    """Held by tensors of this process; on the host, by the process."""
    free_bytes: int
    """What could still be had, by any process."""
    total_bytes: int
    """What there is, or what the system lets the device have."""


@dataclass(frozen=True)
class Recorder:
    """What records work of a device to be replayed."""

    record: Record
    warm: int = 2
    """Runs of a shape before it is captured: libraries choose their kernels and allocate workspaces in them."""
    off: float = 2e-2
    """Largest relative error of the first replay against the eager result."""
    read_settings: Callable[[], Any] = lambda: None
    """Reads the numeric settings that are fixed when work is recorded, such as TF32."""


class Driver:
    """Does things on the devices of one sheet; the default goes through `torch.get_device_module`."""

    marks = False
    """Whether what `record_event` gives waits for what was asked before it alone."""

    def __init__(self, sheet: Sheet) -> None:
        self.sheet = sheet
        self._side_streams: dict[int, Any] = {}

    def load(self) -> None:
        """Import the vendor's modules, so that torch learns of the device."""
        for module in self.sheet.modules:
            importlib.import_module(module)

    def module(self) -> ModuleType:
        """Torch's module of the device: `torch.xpu`."""
        import torch

        self.load()
        module: ModuleType = torch.get_device_module(self.sheet.torch_name)
        return module

    def count(self) -> int:
        """How many devices this process sees; 0 where the runtime finds none."""
        module = self.module()
        return int(module.device_count()) if module.is_available() else 0

    def current_index(self) -> int:
        """The device that this process works on without being told: what `torch.cuda.set_device` set."""
        current = getattr(self.module(), "current_device", lambda: 0)()
        return int(getattr(current, "index", current) or 0)

    def device_name(self, index: int) -> str:
        """What the device calls itself: `NVIDIA H200`; the sheet's title where it does not say."""
        get_name = getattr(self.module(), "get_device_name", None)
        return self.sheet.title if get_name is None else str(get_name(index))

    def product(self, index: int) -> str | None:
        """The product on the sheet that the device is, by the name it gives itself; None if it is on none."""
        name = self.device_name(index)
        for product in self.sheet.products:
            if product.reported_as and re.search(product.reported_as, name):
                return product.name
        return None

    def synchronize(self, index: int) -> None:
        """Wait until the device has done all that was asked of it."""
        self.module().synchronize(index)

    def record_event(self, index: int) -> Callable[[], None]:
        """What waits until the device has done what it was asked for up to now; here, all that it was asked for."""
        return functools.partial(self.synchronize, index)

    def send(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A tensor of the host on the device; from memory that it reads by itself, for which nobody waits."""
        if not self.marks or tensor.nbytes > _MOST_PINNED:
            return tensor.to(device)
        return tensor.pin_memory().to(device, non_blocking=True)

    def side_stream(self, index: int) -> AbstractContextManager[Any]:
        """While the block runs, the device does what it is asked for beside what it was asked for before."""
        if not self.marks:
            return nullcontext()
        module = self.module()
        if index not in self._side_streams:
            self._side_streams[index] = module.Stream(index)
        stream: AbstractContextManager[Any] = module.stream(self._side_streams[index])
        return stream

    def empty_cache(self) -> None:
        """Give cached memory back; a device whose allocator caches nothing has nothing to give."""
        release = getattr(self.module(), "empty_cache", None)
        if release is not None:
            release()

    def manual_seed(self, seed: int) -> None:
        """Seed the host and every device of this kind, so that draws on either are determined."""
        import torch

        torch.manual_seed(seed)
        module = self.module()
        seed_all = getattr(module, "manual_seed_all", None) or getattr(module, "manual_seed", None)
        if seed_all is not None:
            seed_all(seed)

    def memory(self, index: int) -> Memory:
        """Used, free and total memory of one device."""
        get_info, get_used = self._figure("mem_get_info", "get_memory_info"), self._figure("memory_allocated")
        free, total = get_info(index)
        return Memory(used_bytes=int(get_used(index)), free_bytes=int(free), total_bytes=int(total))

    def max_memory(self, index: int) -> int:
        """The most bytes that tensors held at once since the last reset."""
        return int(self._figure("max_memory_allocated")(index))

    def reset_peak_memory(self, index: int) -> None:
        """Start counting the peak anew."""
        self._figure("reset_peak_memory_stats")(index)

    def capture(self, model: torch.nn.Module) -> torch.nn.Module:
        """Record a model as a graph of the device that is replayed; only where the sheet has a mode that captures."""
        raise NotMeasurableError(
            f"{self.sheet.title} ({self.sheet.name}) records no graphs", hint="take another mode, such as eager"
        )

    def recorder(self, index: int) -> Recorder | None:
        """What records work of the device to be replayed; None where there is no such thing."""
        return None

    def resolve_conditions(self, device: torch.device) -> Sheet:
        """The sheet with every number type in doubt (contradicted, or conditional) asked of the device itself.

        A type that is only slow is left as it is, since a right answer says nothing about time; so is fp8, which is
        for storage and for products that need kernels of their own.
        """
        dtypes = self.sheet.dtypes
        changes: dict[str, Answer] = {
            field.name: _measured(field.name, answer, device)
            for field in fields(Dtypes)
            if isinstance(answer := getattr(dtypes, field.name), DtypeLimit)
            and answer.effect != "slow"
            and not field.name.startswith("float8")
            and (answer.conditional or answer.contradicted_by)
        }
        return replace(self.sheet, dtypes=replace(dtypes, **changes)) if changes else self.sheet

    def _figure(self, name: str, accelerator_name: str | None = None) -> Any:
        """The function that reads a figure: the device module's own, or `torch.accelerator`'s for this device."""
        import torch

        own = getattr(self.module(), name, None)
        if own is not None:
            return own
        current = torch.accelerator.current_accelerator()
        shared = getattr(torch.accelerator, accelerator_name or name, None)
        if shared is not None and current is not None and current.type == self.sheet.torch_name:
            return shared
        raise NotMeasurableError(
            f"{self.sheet.title} ({self.sheet.name}) keeps no such figure: neither torch.{self.sheet.torch_name} nor "
            f"torch.accelerator of torch {torch.__version__} has {name}",
            hint="torch.accelerator keeps memory statistics from torch 2.9 on; a newer torch may help",
        )


def _measured(dtype: str, doubted: DtypeLimit, device: torch.device) -> Answer:
    try:
        effect = probe_dtype(dtype, device)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return doubted
    says = f"asked of {device} itself, {dtype} gives: {effect or 'the right answer'}"
    if effect is None:
        return Yes(says=says, source=doubted.source, evidence="hardware")
    return replace(doubted, says=says, effect=effect, evidence="hardware", only_on=(), only_if=())
