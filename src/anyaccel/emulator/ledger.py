"""The ledger: what a program asked of a virtual accelerator that the real one cannot do, and where.

One row a site: the limit, its effect, the operation, the line of the pipeline's or model's own code, how often.
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

_TYPED_IN = ("<stdin>", "<string>")
"""What Python calls a program that was typed in or given by `-c`."""
_MACHINERY = ("cuda_scripts", "emulator", "generation", "runtime", "upstream")
_OURS = tuple(str(Path(__file__).parents[1] / folder) + os.sep for folder in _MACHINERY)
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
_SITE_PACKAGES = sysconfig.get_paths()["purelib"] + os.sep


@dataclass(frozen=True)
class LedgerRow:
    """One site that met one limit."""

    limit: str
    """The name on the sheet: `dtypes.float64`."""
    effect: Effect
    operation: str
    """As torch names it: `aten::arange`."""
    file: str
    line: int
    count: int
    step: int | None
    """The denoising step at which it was first seen; None outside the loop."""


class Ledger:
    """The rows of one virtual accelerator; safe to write from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, Effect, str, str, int]] = Counter()
        self._first_steps: dict[tuple[str, Effect, str, str, int], int | None] = {}
        self._round_trips: Counter[int | None] = Counter()

    def record(self, limit: str, effect: Effect, operation: str) -> tuple[str, int]:
        """Add one event at the line of code that caused it; gives that file and line."""
        file, line, step = _find_site(sys._getframe(1))
        key = (limit, effect, operation, file, line)
        with self._lock:
            self._counts[key] += 1
            self._first_steps.setdefault(key, step)
            if limit == "host_round_trip":
                self._round_trips[step] += 1
        return file, line

    def rows(self, effect: Effect | None = None) -> list[LedgerRow]:
        """All rows, or those of one effect, the worst effect first and the most frequent within it."""
        order: dict[Effect, int] = {"error": 0, "wrong": 1, "narrowed": 2, "slow": 3}
        with self._lock:
            rows = [LedgerRow(*key, count=count, step=self._first_steps[key]) for key, count in self._counts.items()]
        chosen = [row for row in rows if effect is None or row.effect == effect]
        return sorted(chosen, key=lambda row: (order[row.effect], -row.count, row.file, row.line))

    def assert_clean(self, *effects: Effect) -> None:
        """Raise AssertionError with the rows of these effects if there are any; `error` without a name."""
        found = [row for effect in effects or ("error",) for row in self.rows(effect)]
        if found:
            raise AssertionError("the device cannot do this:\n" + "\n".join(_describe(row) for row in found))

    def round_trips(self) -> dict[int | None, int]:
        """How often the host read from the device, by denoising step; None stands for outside the loop."""
        with self._lock:
            return dict(self._round_trips)

    def absorb(self, rows: Iterable[LedgerRow]) -> None:
        """Add the rows of another ledger; round trips by step are not kept in rows, and stay as they are."""
        with self._lock:
            for row in rows:
                key = (row.limit, row.effect, row.operation, row.file, row.line)
                self._counts[key] += row.count
                self._first_steps.setdefault(key, row.step)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._counts.clear()
            self._first_steps.clear()
            self._round_trips.clear()

    def to_json(self) -> str:
        """The rows as a JSON list of objects."""
        return json.dumps([asdict(row) for row in self.rows()], indent=2)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the rows as JSON, whole or not at all."""
        atomic_write(Path(path), self.to_json() + "\n")

    def __str__(self) -> str:
        rows = self.rows()
        if not rows:
            return "the ledger is empty: no limit was met"
        return "\n".join(_describe(row) for row in rows)


def _describe(row: LedgerRow) -> str:
    return f"{row.effect:9}{row.count:6} × {row.limit:28} {row.operation:32} {row.file}:{row.line}"


def _find_site(frame: FrameType | None) -> tuple[str, int, int | None]:
    """The innermost line that is nobody's but the pipeline's or the model's, and the denoising step around it."""
    site: tuple[str, int] | None = None
    while frame is not None:
        code = frame.f_code
        if site is None and not _is_machinery(code.co_filename):
            site = (_shorten(code.co_filename), frame.f_lineno)
        if code.co_name == "__call__":
            step = find_denoising_step(frame)
            if step is not None:
                return (*(site or ("", 0)), step)
        frame = frame.f_back
    return (*(site or ("", 0)), None)


@lru_cache(maxsize=4096)
def _is_machinery(filename: str) -> bool:
    """Whether a file is torch's, ours or the interpreter's, and so never where a fault lies."""
    if filename in _TYPED_IN:
        return False
    if filename.startswith(("<", *_OURS)):
        return True
    if filename.startswith(_SITE_PACKAGES):
        return filename[len(_SITE_PACKAGES) :].startswith(("torch" + os.sep, "accelerate" + os.sep))
    return filename.startswith(_STANDARD_LIBRARY)


@lru_cache(maxsize=4096)
def _shorten(filename: str) -> str:
    """`diffusers/models/embeddings.py` rather than where the environment happens to lie."""
    return filename[len(_SITE_PACKAGES) :] if filename.startswith(_SITE_PACKAGES) else filename
