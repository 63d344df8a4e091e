"""The ledger of a virtual accelerator: which device limits a program hit, and where.

Each row contains a limit, its effect, the operation, the line of pipeline or model code that hit
the limit, and the number of hits.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from types import FrameType

from anyaccel.backends.claim import Effect
from anyaccel.storage.atomic_write import atomic_write
from anyaccel.upstream.diffusers_internals import find_denoising_step

__all__ = ["Ledger", "LedgerRow"]

# File names of code from standard input or `python -c`.
_INTERACTIVE_FILES = ("<stdin>", "<string>")
# Packages of anyaccel that run between a program and the device. The others are treated as user code.
_RUNTIME_PACKAGES = ("cuda_scripts", "emulator", "generation", "runtime", "upstream")
_RUNTIME_FOLDERS = tuple(str(Path(__file__).parents[1] / package) + os.sep for package in _RUNTIME_PACKAGES)
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
_SITE_PACKAGES = sysconfig.get_paths()["purelib"] + os.sep


@dataclass(frozen=True)
class LedgerRow:
    """A source line that hit a limit, with the operation and the number of hits."""

    limit: str
    """The name on the sheet: `dtypes.float64`."""
    effect: Effect
    operation: str
    """The operator: `aten::arange`."""
    file: str
    line: int
    count: int
    step: int | None
    """The denoising step of the first hit; None outside the loop."""


class Ledger:
    """Thread-safe record of the limits that a program hit on a virtual accelerator."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, Effect, str, str, int]] = Counter()
        self._first_steps: dict[tuple[str, Effect, str, str, int], int | None] = {}
        self._round_trips: Counter[int | None] = Counter()

    def record(self, limit: str, effect: Effect, operation: str) -> tuple[str, int]:
        """Count a hit for the source line that caused it; return the file and line number."""
        # Outside the lock: walking the stack is the slow part.
        file, line, step = _find_site(sys._getframe(1))
        key = (limit, effect, operation, file, line)
        with self._lock:
            self._counts[key] += 1
            self._first_steps.setdefault(key, step)
            if limit == "host_round_trip":
                self._round_trips[step] += 1
        return file, line

    def rows(self, effect: Effect | None = None) -> list[LedgerRow]:
        """Return all rows, or those with the given effect, sorted by severity and then by count."""
        order: dict[Effect, int] = {"error": 0, "wrong": 1, "narrowed": 2, "slow": 3}
        with self._lock:
            rows = [LedgerRow(*key, count=count, step=self._first_steps[key]) for key, count in self._counts.items()]
        selected = [row for row in rows if effect is None or row.effect == effect]
        return sorted(selected, key=lambda row: (order[row.effect], -row.count, row.file, row.line))

    def assert_clean(self, *effects: Effect) -> None:
        """Raise AssertionError if the ledger has rows with the given effects (default: "error")."""
        rows = [row for effect in effects or ("error",) for row in self.rows(effect)]
        if rows:
            raise AssertionError("the code hit limits of the device:\n" + "\n".join(_format_row(row) for row in rows))

    def round_trips(self) -> dict[int | None, int]:
        """Return the number of device-to-CPU reads per denoising step (None for reads outside the loop)."""
        with self._lock:
            return dict(self._round_trips)

    def merge(self, rows: Iterable[LedgerRow]) -> None:
        """Add rows from another ledger. `round_trips` does not change, because rows have no per-step counts."""
        with self._lock:
            for row in rows:
                key = (row.limit, row.effect, row.operation, row.file, row.line)
                self._counts[key] += row.count
                self._first_steps.setdefault(key, row.step)

    def clear(self) -> None:
        """Remove all rows and reset the counts of device-to-CPU reads."""
        with self._lock:
            self._counts.clear()
            self._first_steps.clear()
            self._round_trips.clear()

    def to_json(self) -> str:
        """Return the rows as a JSON list of objects."""
        return json.dumps([asdict(row) for row in self.rows()], indent=2)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the rows to a JSON file atomically."""
        atomic_write(Path(path), self.to_json() + "\n")

    def __str__(self) -> str:
        rows = self.rows()
        if not rows:
            return "the ledger is empty: no limit was hit"
        return "\n".join(_format_row(row) for row in rows)


def _format_row(row: LedgerRow) -> str:
    return f"{row.effect:9}{row.count:6} × {row.limit:28} {row.operation:32} {row.file}:{row.line}"


def _find_site(frame: FrameType | None) -> tuple[str, int, int | None]:
    """Return the file, the line and the denoising step that caused the current operation.

    The line is in the innermost frame outside torch, accelerate and anyaccel. The step is None outside
    the denoising loop.
    """
    site: tuple[str, int] | None = None
    while frame is not None:
        code = frame.f_code
        if site is None and not _is_internal(code.co_filename):
            site = (_shorten(code.co_filename), frame.f_lineno)
        # The step counter is a local of the pipeline's __call__, further out than the line itself.
        if code.co_name == "__call__":
            step = find_denoising_step(frame)
            if step is not None:
                return (*(site or ("", 0)), step)
        frame = frame.f_back
    return (*(site or ("", 0)), None)


# Cached: every hit walks the whole stack, and a run has millions of hits in a few hundred files.
@lru_cache(maxsize=4096)
def _is_internal(filename: str) -> bool:
    """Return whether a file belongs to torch, accelerate, anyaccel or Python's standard library."""
    if filename in _INTERACTIVE_FILES:
        return False
    if filename.startswith(("<", *_RUNTIME_FOLDERS)):
        return True
    if filename.startswith(_SITE_PACKAGES):
        return filename[len(_SITE_PACKAGES) :].startswith(("torch" + os.sep, "accelerate" + os.sep))
    return filename.startswith(_STANDARD_LIBRARY)


@lru_cache(maxsize=4096)
def _shorten(filename: str) -> str:
    """Return a path relative to site-packages, such as `diffusers/models/embeddings.py`."""
    return filename[len(_SITE_PACKAGES) :] if filename.startswith(_SITE_PACKAGES) else filename
