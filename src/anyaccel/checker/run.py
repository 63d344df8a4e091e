"""Running a pipeline on a virtual device, held against the CPU: a process a device, side by side as cores allow."""

from __future__ import annotations

import linecache
import logging
import os
import sysconfig
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyaccel.backends.claim import Limit
from anyaccel.checker.report import DeviceReport, Graphs, Violation
from anyaccel.recipes.recipe import Recipe, run

if TYPE_CHECKING:
    from anyaccel.backends.sheet import Sheet
    from anyaccel.emulator.accelerator import VirtualAccelerator
    from anyaccel.emulator.ledger import Row

__all__ = ["Ways", "run_on_devices"]

_TIMEOUT_S = 3600.0
_NEVER_ON_SHEET = "a limit that the sheet of this version does not list"


@dataclass(frozen=True, kw_only=True)
class Ways:
    """How a check runs a pipeline."""

    placed: bool = True
    strict: bool = False
    compiled: bool = False


def run_on_devices(recipe: Recipe, devices: list[str], ways: Ways) -> Iterator[DeviceReport]:
    """Check one pipeline on some virtual devices; the reports come in the order that was asked for."""
    from anyaccel.emulator.process import fork, run_forked

    # Nothing runs in this process: threads that torch started here would be missing in those that are forked from it.
    expected = fork(lambda: _run_on_host(recipe), timeout_s=_TIMEOUT_S)

    def check(device: str) -> DeviceReport:
        use = _Use(recipe, expected, ways)
        return run_forked(device, use, strict=ways.strict, timeout_s=_TIMEOUT_S)

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:  # a thread waits for each process
        yield from pool.map(check, devices)


def _run_on_host(recipe: Recipe) -> Any:
    _quieten()
    return run(recipe, recipe.make())


def _quieten() -> None:
    """One thread a process, since processes run side by side; and nobody reads warnings of a tiny pipeline."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


@dataclass(frozen=True)
class _Use:
    """What is done in the process of one device."""

    recipe: Recipe
    expected: Any
    ways: Ways

    def __call__(self, accelerator: VirtualAccelerator) -> DeviceReport:
        _quieten()
        begun = time.perf_counter()
        pipe: Any = self.recipe.make()
        accelerator.ledger.clear()
        error, seen = "", None
        try:
            seen = run(self.recipe, self._put(pipe, accelerator))
        except Exception as failure:  # noqa: BLE001 - a failure is a finding here, and is shown with its words
            error = f"{type(failure).__name__}: {failure}".splitlines()[0][:400]
        return DeviceReport(
            device=accelerator.sheet.name,
            virtual=True,
            placed=self.ways.placed,
            finished=seen is not None,
            error=error,
            max_difference=None if seen is None else _difference(self.expected, seen),
            host_round_trips_per_step=_round_trips(accelerator.ledger.round_trips()) if seen is not None else None,
            violations=tuple(_explain(row, accelerator.sheet) for row in accelerator.ledger.rows()),
            graphs=_read_graphs(accelerator) if self.ways.compiled else None,
            seconds=round(time.perf_counter() - begun, 2),
        )

    def _put(self, pipe: Any, accelerator: VirtualAccelerator) -> Any:
        if not self.ways.placed:
            return pipe.to(accelerator.device())
        from anyaccel.runtime.pipeline import place

        placed = place(pipe, accelerator.device(), dtype="float32")
        if self.ways.compiled:
            placed.enable_compile()
        return placed


def _difference(expected: Any, seen: Any) -> float:
    import numpy

    if expected.shape != seen.shape:
        return float("inf")
    return float(numpy.abs(expected - seen).max())


def _round_trips(by_step: dict[int | None, int]) -> float:
    """How often the host waits for the device at a step, on average over the steps in which it did at all."""
    within = {step: count for step, count in by_step.items() if step is not None}
    return sum(within.values()) / (max(within) + 1) if within else 0.0


def _explain(row: Row, sheet: Sheet) -> Violation:
    limit = sheet.limits(Limit).get(row.limit)
    return Violation(
        limit=row.limit,
        effect=row.effect,
        operation=row.operation,
        file=row.file,
        line=row.line,
        code=linecache.getline(str(_whole_path(row.file)), row.line).strip(),
        count=row.count,
        step=row.step,
        says=limit.says if limit else _NEVER_ON_SHEET,
        source=limit.source if limit else "",
        evidence=limit.evidence if limit else None,
        hint=limit.hint if limit else "",
    )


def _whole_path(file: str) -> Path:
    path = Path(file)
    return path if path.is_absolute() else Path(sysconfig.get_paths()["purelib"]) / path


def _read_graphs(accelerator: VirtualAccelerator) -> Graphs:
    book = accelerator.compiler
    return Graphs(
        compiled=len(book.graphs),
        recompiled_for=tuple(graph.inputs for graph in book.recompilations),
        breaks=tuple(f"{one.file}:{one.line}: {one.reason}" for one in book.breaks),
    )
