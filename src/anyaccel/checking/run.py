"""Pipeline runs on virtual devices, one process per device, compared with a run on the CPU."""

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
    from anyaccel.emulator.limit_ledger import LedgerRow

__all__ = ["CheckMode", "OnReport", "run_on_cpu", "run_on_device", "run_on_devices"]

_TIMEOUT_S = 3600.0
_PACKAGE = Path(__file__).parents[1]
_FIX_ON_CPU = "fix the error on the CPU, then run the check again"
_UNLISTED_LIMIT = "this limit is not in the device sheet of this anyaccel version"


@dataclass(frozen=True, kw_only=True)
class CheckMode:
    """Options for a check: placement by anyaccel, strict mode and compilation."""

    placed: bool = True
    """Placed by anyaccel instead of `pipe.to(device)`."""
    strict: bool = False
    """Raise where the device would, instead of recording the violation."""
    compiled: bool = False


# Callback with the report of each finished device.
OnReport = Callable[[DeviceReport], None]


def run_on_devices(
    recipe: Recipe, devices: list[str], mode: CheckMode, on_report: OnReport | None = None
) -> list[DeviceReport]:
    """Check one pipeline on virtual devices and return the reports in the order of `devices`.

    `on_report` is called with each report as soon as it is complete.
    """
    from anyaccel.processes.forked_call import forking_threads

    expected = run_on_cpu([recipe])

    def check(device: str) -> DeviceReport:
        try:
            report = run_on_device(device, [recipe], expected, [mode])[0]
        except (VirtualDeviceError, TimeoutError) as error:  # the other devices still get their reports
            report = DeviceReport(
                device=device, virtual=True, placed=mode.placed, finished=False, error=first_line(error)
            )
        if on_report:
            on_report(report)
        return report

    with forking_threads(os.cpu_count() or 1) as pool:  # each thread waits for one process
        return list(pool.map(check, devices))


def run_on_cpu(recipes: Sequence[Recipe]) -> dict[str, Any]:
    """Run pipelines on the CPU in a separate process and return their outputs by recipe name."""
    from anyaccel.processes.forked_call import call_in_fork

    def use() -> dict[str, Any]:
        with _forked_process():
            return {recipe.name: _run_reference(recipe) for recipe in recipes}

    # This process must not compute anything: torch would start threads, and later forks would wait for them forever.
    # https://github.com/pytorch/pytorch/issues/17199
    return call_in_fork(use, name="the CPU run", timeout_s=_TIMEOUT_S)


def _run_reference(recipe: Recipe) -> Any:
    """Run a pipeline on the CPU; raise `UsageError` if it fails, as the error is not device-specific."""
    try:
        return run(recipe, recipe.make())
    except AnyaccelError as error:
        raise UsageError(f"{recipe.name} fails on the CPU: {error.message}", hint=_FIX_ON_CPU) from error
    except Exception as error:
        raise UsageError(f"{recipe.name} fails on the CPU: {describe_failure(error)}", hint=_FIX_ON_CPU) from error


def run_on_device(
    device: str, recipes: Sequence[Recipe], expected: Mapping[str, Any], modes: Sequence[CheckMode]
) -> list[DeviceReport]:
    """Check each recipe in each mode on one virtual device, all in one separate process."""
    from anyaccel.emulator.run_forked import run_forked

    def use(accelerator: VirtualAccelerator) -> list[DeviceReport]:
        with _forked_process():
            return [_attempt(accelerator, recipe, expected[recipe.name], mode) for recipe in recipes for mode in modes]

    return run_forked(device, use, strict=any(mode.strict for mode in modes), timeout_s=_TIMEOUT_S)


@contextlib.contextmanager
def _forked_process() -> Iterator[None]:
    """Configure a forked process: one thread, no library output, and stdout redirected to stderr."""
    import torch

    torch.set_num_threads(1)  # several processes run at the same time
    # Pipelines print, and native libraries write to file descriptor 1. Neither belongs in a JSON report.
    sys.stdout = sys.stderr
    with contextlib.suppress(OSError):
        os.dup2(2, 1)
    silence_process()
    with quiet_libraries(everything=True), no_progress_bars():
        yield


def _attempt(accelerator: VirtualAccelerator, recipe: Recipe, expected: Any, mode: CheckMode) -> DeviceReport:
    """Create a pipeline, run it on the device and compare the image with the CPU image."""
    started = time.perf_counter()
    pipe: Any = recipe.make()
    accelerator.ledger.clear()  # building the pipeline is not part of the check
    error, actual = "", None
    try:
        actual = run(recipe, _move(pipe, accelerator, mode))
    except Exception as failure:  # noqa: BLE001 - any failure is a finding, reported with its message
        error = describe_failure(failure)
    return DeviceReport(
        device=accelerator.sheet.name,
        virtual=True,
        placed=mode.placed,
        finished=actual is not None,
        error=error,
        max_difference=None if actual is None else measure_difference(actual, expected),
        host_round_trips_per_step=_average_per_step(accelerator.ledger.round_trips()) if actual is not None else None,
        violations=tuple(
            _make_violation(row, accelerator.sheet) for row in accelerator.ledger.rows() if not _is_ours(row)
        ),
        graphs=_read_graphs(accelerator) if mode.compiled else None,
        seconds=round(time.perf_counter() - started, 2),
    )


def _move(pipe: Any, accelerator: VirtualAccelerator, mode: CheckMode) -> Any:
    if not mode.placed:
        return pipe.to(accelerator.device())
    from anyaccel.runtime.pipeline import place

    # float32, because the tolerance does not cover rounding to half precision.
    placed = place(pipe, accelerator.device(), dtype="float32")
    if mode.compiled:
        placed.enable_compile()
    return placed


def _average_per_step(by_step: dict[int | None, int]) -> float:
    """Return the average number of device synchronizations per denoising step."""
    in_loop = {step: count for step, count in by_step.items() if step is not None}
    return sum(in_loop.values()) / (max(in_loop) + 1) if in_loop else 0.0


def _is_ours(row: LedgerRow) -> bool:
    """Return whether a ledger row comes from anyaccel's own code, not from the checked pipeline."""
    return Path(row.file).is_absolute() and Path(row.file).is_relative_to(_PACKAGE)


def _make_violation(row: LedgerRow, sheet: Sheet) -> Violation:
    limit = sheet.limits(Limit).get(row.limit)
    return Violation(
        limit=row.limit,
        effect=row.effect,
        operation=row.operation,
        file=row.file,
        line=row.line,
        code=linecache.getline(str(_absolute_path(row.file)), row.line).strip(),
        count=row.count,
        step=row.step,
        says=limit.says if limit else _UNLISTED_LIMIT,
        source=limit.source if limit else "",
        evidence=limit.evidence if limit else None,
        hint=limit.hint if limit else "",
    )


def _absolute_path(file: str) -> Path:
    # The ledger names library files relative to site-packages.
    path = Path(file)
    return path if path.is_absolute() else Path(sysconfig.get_paths()["purelib"]) / path


def _read_graphs(accelerator: VirtualAccelerator) -> Graphs:
    compiler = accelerator.compiler
    return Graphs(
        compiled=len(compiler.graphs),
        recompiled_for=tuple(graph.inputs for graph in compiler.recompilations),
        breaks=tuple(f"{graph_break.file}:{graph_break.line}: {graph_break.reason}" for graph_break in compiler.breaks),
    )
