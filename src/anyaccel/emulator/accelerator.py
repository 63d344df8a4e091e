"""The virtual accelerator of this process: its sheet, its devices, its ledger and its memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from anyaccel.backends.claim import Limit
from anyaccel.backends.sheet import Sheet
from anyaccel.emulator.compiler_stub import CompileLog
from anyaccel.emulator.ledger import Ledger
from anyaccel.emulator.limit_index import LimitIndex
from anyaccel.emulator.memory_tracker import MemoryTracker
from anyaccel.errors import LimitError, LimitTypeError

__all__ = ["VirtualAccelerator"]


@dataclass
class VirtualAccelerator:
    """What a program sees as the device, and what it left behind."""

    sheet: Sheet
    count: int = 1
    capacity_bytes: int | None = None
    strict: bool = False
    ledger: Ledger = field(default_factory=Ledger)
    compiler: CompileLog = field(default_factory=CompileLog)
    enforcing: bool = True
    current_index: int = 0

    def __post_init__(self) -> None:
        self.limits = LimitIndex(self.sheet)
        self.book = MemoryTracker(self.count, self.capacity_bytes)
        self.generators = [torch.Generator().manual_seed(0) for _ in range(self.count)]
        self.round_trips = 0

    def restart(self, sheet: Sheet, capacity_bytes: int | None, strict: bool) -> None:
        """Enforce again, with new options and an empty ledger; tensors that live on keep counting."""
        self.sheet, self.strict, self.capacity_bytes = sheet, strict, capacity_bytes
        self.limits = LimitIndex(sheet)
        self.book.capacity_bytes = capacity_bytes
        self.ledger.clear()
        self.compiler.graphs.clear()
        self.compiler.breaks.clear()
        self.round_trips = 0
        self.enforcing = True

    @property
    def name(self) -> str:
        """Torch's name of the device."""
        return self.sheet.torch_name

    def device(self, index: int | None = None) -> torch.device:
        """One of the devices, the current one without an index."""
        return torch.device(self.name, self.current_index if index is None else index)

    def check_index(self, index: int) -> int:
        """The index, if there is such a device; torch's own kind of error otherwise."""
        if not 0 <= index < self.count:
            raise RuntimeError(f"{self.name}:{index}: invalid device ordinal; there are {self.count} of them")
        return index

    def meet(self, name: str, limit: Limit, operation: str) -> None:
        """A program met a limit: write it down, and in strict mode raise what the device would raise."""
        if not self.enforcing:
            return
        file, line = self.ledger.record(name, limit.effect, operation)
        if self.strict and limit.effect == "error":
            kind = LimitTypeError if limit.raises == "TypeError" else LimitError
            raise kind(
                f"{self.sheet.title} (virtual) cannot do this: {operation} at {file}:{line} meets the limit {name}. "
                f"{limit.says} ({limit.evidence}: {limit.source})",
                hint=limit.hint,
            )

    def read_on_host(self, operation: str) -> None:
        """The host read a value back: count it, and write it down where the sheet says that it costs."""
        self.round_trips += 1
        if self.limits.round_trip is not None:
            self.meet("host_round_trip", self.limits.round_trip, operation)
