"""State of this process's virtual accelerator: sheet, devices, ledger and memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from anyaccel.backends.claim import Limit
from anyaccel.backends.sheet import Sheet
from anyaccel.emulator.compiler_stub import CompileLog
from anyaccel.emulator.limit_index import LimitIndex
from anyaccel.emulator.limit_ledger import Ledger
from anyaccel.emulator.memory_tracker import MemoryTracker
from anyaccel.errors import LimitError, LimitTypeError

__all__ = ["VirtualAccelerator"]


@dataclass
class VirtualAccelerator:
    """A virtual accelerator: its sheet, devices and memory, and a ledger of the limits that were hit."""

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
        self.memory = MemoryTracker(self.count, self.capacity_bytes)
        self.generators = [torch.Generator().manual_seed(0) for _ in range(self.count)]
        self.round_trips = 0

    def restart(self, sheet: Sheet, capacity_bytes: int | None, strict: bool) -> None:
        """Restart the enforcement of limits with new options and an empty ledger.

        Tensors that are still alive continue to count toward the memory use.
        """
        self.sheet, self.strict, self.capacity_bytes = sheet, strict, capacity_bytes
        self.limits = LimitIndex(sheet)
        # Not a new tracker: tensors of the previous run still use memory.
        self.memory.capacity_bytes = capacity_bytes
        self.ledger.clear()
        self.compiler.graphs.clear()
        self.compiler.breaks.clear()
        self.round_trips = 0
        self.enforcing = True

    @property
    def name(self) -> str:
        """The torch device type, such as `hpu`."""
        return self.sheet.torch_name

    def device(self, index: int | None = None) -> torch.device:
        """Return the device with the given index, or the current device if the index is None."""
        return torch.device(self.name, self.current_index if index is None else index)

    def check_index(self, index: int) -> int:
        """Return the index; raise RuntimeError, as torch does, if it is out of range."""
        if not 0 <= index < self.count:
            raise RuntimeError(f"{self.name}:{index}: invalid device ordinal; the device count is {self.count}")
        return index

    def hit_limit(self, name: str, limit: Limit, operation: str) -> None:
        """Record in the ledger that an operation hit a limit.

        In strict mode, raise LimitError if the effect of the limit is `error`.
        """
        if not self.enforcing:
            return
        file, line = self.ledger.record(name, limit.effect, operation)
        if self.strict and limit.effect == "error":
            # The class matches the real device (MPS raises TypeError for float64), so `except` clauses still work.
            error_class = LimitTypeError if limit.raises == "TypeError" else LimitError
            raise error_class(
                f"{self.sheet.title} (virtual) does not support {operation} at {file}:{line} (limit {name}). "
                f"{limit.says} ({limit.evidence}: {limit.source})",
                hint=limit.hint,
            )

    def record_host_read(self, operation: str) -> None:
        """Count a device-to-CPU read; add it to the ledger if the sheet lists such reads as a limit."""
        # Unlike the ledger, this counter also covers devices without the limit.
        self.round_trips += 1
        if self.limits.round_trip is not None:
            self.hit_limit("host_round_trip", self.limits.round_trip, operation)
