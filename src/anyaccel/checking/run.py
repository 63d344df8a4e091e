"""Running a pipeline on a virtual device, held against the CPU: a process a device, side by side as cores allow."""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyaccel.backends.claim import Limit
from anyaccel.checking.error_text import describe_failure
from anyaccel.checking.report import DeviceReport, Graphs, Violation
from anyaccel.errors import AnyaccelError, UsageError, VirtualDeviceError, first_line
from anyaccel.generation.image_difference import measure_difference
from anyaccel.library_logging import no_progress_bars, quiet_libraries, silence_process
from anyaccel.recipes.recipe import Recipe, run

if TYPE_CHECKING:
    from anyaccel.backends.sheet import Sheet
    from anyaccel.emulator.accelerator import VirtualAccelerator
    from anyaccel.emulator.ledger import LedgerRow

__all__ = ["CheckMode", "OnReport", "run_on_device", "run_on_devices", "run_on_host"]

_TIMEOUT_S = 3600.0
_PACKAGE = Path(__file__).parents[1]
_NEVER_ON_SHEET = "a limit that the sheet of this version does not list"


@dataclass(frozen=True, kw_only=True)
class CheckMode:
    """How a check runs a pipeline."""

    placed: bool = True
    strict: bool = False
    compiled: bool = False


OnReport = Callable[[DeviceReport], None]


def run_on_devices(
    recipe: Recipe, devices: list[str], ways: CheckMode, told: OnReport | None = None
) -> list[DeviceReport]:
    """Check one pipeline on some virtual devices; return the reports in the order of `devices`.

    `told` hears of each as soon as it is there.
    """
    from anyaccel.processes.forked_call import forking_threads

    expected = run_on_host([recipe])

    def check(device: str) -> DeviceReport:
        try:
            report = run_on_device(device, [recipe], expected, [ways])[0]
        except (VirtualDeviceError, TimeoutError) as death:  # the others are still told of
            report = DeviceReport(
                device=device, virtual=True, placed=ways.placed, finished=False, error=first_line(death)
            )
        if told:
            told(report)
        return report

    with forking_threads(os.cpu_count() or 1) as pool:  # a thread waits for each process
        return list(pool.map(check, devices))


def run_on_host(recipes: Sequence[Recipe]) -> dict[str, Any]:
    """What each pipeline gives on the CPU, by the recipe's name, in a process of its own."""
    from anyaccel.processes.forked_call import call_in_fork

    def use() -> dict[str, Any]:
        with _in_its_own_process():
            return {recipe.name: _run_reference(recipe) for recipe in recipes}

    # Nothing runs in this process: threads that torch started here would be missing in those that are forked from it.
    return call_in_fork(use, name="the run on the CPU", timeout_s=_TIMEOUT_S)


def _run_reference(recipe: Recipe) -> Any:
    """What the pipeline gives on the CPU; where it fails there already, no device is to blame."""
    try:
        return run(recipe, recipe.make())
    except AnyaccelError as error:
        raise UsageError(f"on the CPU already: {error.message}", hint="mend that first") from error
    except Exception as error:
        raise UsageError(
            f"{recipe.name} fails on the CPU already: {describe_failure(error)}", hint="mend that first"
        ) from error


def run_on_device(
    device: str, recipes: Sequence[Recipe], expected: Mapping[str, Any], ways: Sequence[CheckMode]
) -> list[DeviceReport]:
    """Check pipelines on one virtual device, in one process of its own: each recipe in each of the ways."""
    from anyaccel.emulator.run_forked import run_forked

    def use(accelerator: VirtualAccelerator) -> list[DeviceReport]:
        with _in_its_own_process():
            return [_attempt(accelerator, recipe, expected[recipe.name], way) for recipe in recipes for way in ways]

    return run_forked(device, use, strict=any(way.strict for way in ways), timeout_s=_TIMEOUT_S)


@contextlib.contextmanager
def _in_its_own_process() -> Iterator[None]:
    """Prepare a forked process: one thread, since processes run side by side, and nothing on stdout.

    Nobody reads warnings and bars of a tiny pipeline.
    """
    import torch

    torch.set_num_threads(1)
    sys.stdout = sys.stderr  # what a pipeline prints is no part of a report
    with contextlib.suppress(OSError):
        os.dup2(2, 1)
    silence_process()
    with quiet_libraries(everything=True), no_progress_bars():
        yield


def _attempt(accelerator: VirtualAccelerator, recipe: Recipe, expected: Any, ways: CheckMode) -> DeviceReport:
    """Make a pipeline, put it on the device, run it, and hold it against the CPU's picture."""
    begun = time.perf_counter()
    pipe: Any = recipe.make()
    accelerator.ledger.clear()
    error, seen = "", None
    try:
        seen = run(recipe, _put(pipe, accelerator, ways))
    except Exception as failure:  # noqa: BLE001 - a failure is a finding here, and is shown with its words
        error = describe_failure(failure)
    return DeviceReport(
        device=accelerator.sheet.name,
        virtual=True,
        placed=ways.placed,
        finished=seen is not None,
        error=error,
        max_difference=None if seen is None else measure_difference(seen, expected),
        host_round_trips_per_step=_round_trips(accelerator.ledger.round_trips()) if seen is not None else None,
        violations=tuple(_explain(row, accelerator.sheet) for row in accelerator.ledger.rows() if not _is_ours(row)),
        graphs=_read_graphs(accelerator) if ways.compiled else None,
        seconds=round(time.perf_counter() - begun, 2),
    )


def _put(pipe: Any, accelerator: VirtualAccelerator, ways: CheckMode) -> Any:
    if not ways.placed:
        return pipe.to(accelerator.device())
    from anyaccel.runtime.pipeline import place

    placed = place(pipe, accelerator.device(), dtype="float32")
    if ways.compiled:
        placed.enable_compile()
    return placed


def _round_trips(by_step: dict[int | None, int]) -> float:
    """How often the host waits for the device at a step, on average over the steps in which it did at all."""
    within = {step: count for step, count in by_step.items() if step is not None}
    return sum(within.values()) / (max(within) + 1) if within else 0.0


def _is_ours(row: LedgerRow) -> bool:
    """Whether the line is our own call of the pipeline, where the picture is fetched once it is done."""
    return Path(row.file).is_absolute() and Path(row.file).is_relative_to(_PACKAGE)


def _explain(row: LedgerRow, sheet: Sheet) -> Violation:
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
