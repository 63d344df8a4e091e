"""Chart data: results for every tiny test pipeline on every virtual device, with and without anyaccel."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anyaccel.checking.report import DeviceReport, State, Violation
from anyaccel.checking.run import CheckMode, run_on_cpu, run_on_device
from anyaccel.errors import UsageError, nearest, summarize_error
from anyaccel.processes.forked_call import forking_threads
from anyaccel.recipes import Recipe

__all__ = ["Attempt", "Chart", "ChartCell", "ChartRow", "CodeLine", "LimitFinding", "find_families", "make_chart"]

_PACKAGES = Path(__file__).parents[3]
_PLAIN, _PLACED = CheckMode(placed=False), CheckMode(placed=True)
# Pipelines per process. A smaller group starts more processes; a larger one repeats more work after a crash.
_LARGEST_GROUP = 12


@dataclass(frozen=True)
class CodeLine:
    """A line of source code: its file, its line number and its text."""

    file: str
    line: int
    code: str


@dataclass(frozen=True)
class LimitFinding:
    """A line of code that hits a device limit.

    `count` is the number of hits. `step` is the denoising step of the first hit, or None outside the
    denoising loop.
    """

    limit: str
    effect: str
    site: CodeLine
    count: int
    step: int | None


@dataclass(frozen=True)
class Attempt:
    """Result of running one pipeline on one device, with plain diffusers or with anyaccel."""

    state: State
    error: str = ""
    max_difference: float | None = None
    waits_per_step: float | None = None
    findings: tuple[LimitFinding, ...] = ()

    def count(self) -> dict[str, int]:
        """Return the number of code lines that hit a limit, keyed by effect: `{"error": 2}`."""
        effects = [finding.effect for finding in self.findings]
        return {effect: effects.count(effect) for effect in dict.fromkeys(effects)}


@dataclass(frozen=True)
class ChartCell:
    """Results for one pipeline on one device, with plain diffusers and with anyaccel."""

    device: str
    plain: Attempt
    placed: Attempt


@dataclass(frozen=True)
class ChartRow:
    """Results for one pipeline on all devices."""

    recipe: str
    pipeline: str
    family: str
    cells: tuple[ChartCell, ...]

    def cell(self, device: str) -> ChartCell:
        """Return the cell for the given device."""
        return next(cell for cell in self.cells if cell.device == device)


@dataclass(frozen=True)
class Chart:
    """Chart rows, with the date, the software versions and the machine used to compute them."""

    devices: tuple[str, ...]
    rows: tuple[ChartRow, ...]
    seconds: float
    environment: dict[str, Any] = field(default_factory=dict)
    """Date, versions and machine."""

    def count(self, device: str, mode: str, state: State) -> int:
        """Return the number of pipelines in the given state on a device; `mode` is `plain` or `placed`."""
        return sum(getattr(row.cell(device), mode).state == state for row in self.rows)


# Callback with the number of finished cells, the number of all cells, and the family that was finished last.
OnChartProgress = Callable[[int, int, str], None]


def find_families(names: Sequence[str], all_recipes: Iterable[Recipe]) -> list[Recipe]:
    """Return the recipes with the given family or recipe names, or all recipes if `names` is empty."""
    recipes = list(all_recipes)
    valid_names = {recipe.family for recipe in recipes} | {recipe.name for recipe in recipes}
    for name in names:
        if name not in valid_names:
            raise UsageError(f"unknown family or recipe {name!r}", hint=nearest(name, sorted(valid_names)))
    return [recipe for recipe in recipes if not names or recipe.family in names or recipe.name in names]


def make_chart(
    recipes: Sequence[Recipe], devices: Sequence[str], *, jobs: int = 2, on_progress: OnChartProgress | None = None
) -> Generator[ChartRow, None, None]:
    """Run every recipe on every virtual device, and yield each row as soon as it is complete.

    Each recipe runs twice per device: with plain diffusers and with anyaccel. The worker processes are
    terminated when the generator is closed or raises an error.
    """
    _import_pipelines(recipes)
    groups = list(_group(recipes))
    done, total = 0, len(recipes) * len(devices)
    with forking_threads(jobs) as pool:  # each thread waits for the processes of one group
        running = {pool.submit(_run_group, group, devices): group for group in groups}
        for finished in as_completed(running):
            done += len(running[finished]) * len(devices)
            if on_progress:
                on_progress(done, total, running[finished][0].family)
            yield from finished.result()


def _import_pipelines(recipes: Sequence[Recipe]) -> None:
    """Import the pipeline classes in the parent process, so that forked processes inherit them."""
    diffusers = importlib.import_module("diffusers")
    importlib.import_module("anyaccel.runtime.pipeline")
    for recipe in recipes:
        getattr(diffusers, recipe.pipeline)


def _group(recipes: Sequence[Recipe]) -> Iterator[list[Recipe]]:
    """Yield groups of recipes from the same family, largest group first."""
    families: dict[str, list[Recipe]] = {}
    for recipe in recipes:
        families.setdefault(recipe.family, []).append(recipe)
    groups = [
        family[start : start + _LARGEST_GROUP]
        for family in families.values()
        for start in range(0, len(family), _LARGEST_GROUP)
    ]
    # The longest jobs start first, so that the cores finish at about the same time.
    yield from sorted(groups, key=len, reverse=True)


def _run_group(recipes: Sequence[Recipe], devices: Sequence[str]) -> list[ChartRow]:
    # The CPU images are computed once per group and shared by all devices and both modes.
    expected = run_on_cpu(recipes)
    cells: dict[str, list[ChartCell]] = {recipe.name: [] for recipe in recipes}
    for device in devices:
        for recipe, cell in zip(recipes, _run_guarded(device, recipes, expected), strict=True):
            cells[recipe.name].append(cell)
    return [
        ChartRow(recipe=recipe.name, pipeline=recipe.pipeline, family=recipe.family, cells=tuple(cells[recipe.name]))
        for recipe in recipes
    ]


def _run_guarded(device: str, recipes: Sequence[Recipe], expected: dict[str, Any]) -> list[ChartCell]:
    """Return the chart cells for recipes that run in one process.

    If the process dies, each recipe runs again in its own process.
    """
    try:
        reports = run_on_device(device, recipes, expected, (_PLAIN, _PLACED))
    except CancelledError:  # the chart was interrupted
        raise
    except Exception as error:  # noqa: BLE001 - a crash of the process is a finding too
        if len(recipes) > 1:
            return [cell for recipe in recipes for cell in _run_guarded(device, [recipe], expected)]
        # Both modes share the process, so the crash cannot be attributed to one of them.
        crash = Attempt("stops", error=summarize_error(error))
        return [ChartCell(device, crash, crash)]
    # Each recipe has two reports, in the order of the modes above.
    pairs = zip(reports[::2], reports[1::2], strict=True)
    return [ChartCell(device, _make_attempt(plain), _make_attempt(placed)) for plain, placed in pairs]


def _make_attempt(report: DeviceReport) -> Attempt:
    return Attempt(
        state=report.state,
        error=report.error,
        max_difference=report.max_difference,
        waits_per_step=report.host_round_trips_per_step,
        findings=tuple(_merge_lines(report.violations)),
    )


def _merge_lines(violations: Sequence[Violation]) -> Iterator[LimitFinding]:
    """Yield one finding per line of code and limit, with the total number of hits by all operations."""
    by_line: dict[tuple[str, str, CodeLine], list[Violation]] = {}
    for violation in violations:
        site = CodeLine(_package_path(violation.file), violation.line, violation.code)
        by_line.setdefault((violation.limit, violation.effect, site), []).append(violation)
    for (limit, effect, site), group in by_line.items():
        yield LimitFinding(limit, effect, site, sum(violation.count for violation in group), group[0].step)


def _package_path(file: str) -> str:
    """Return a package file's path without the install location: `anyaccel/recipes/recipe.py`."""
    path = Path(file)
    return path.relative_to(_PACKAGES).as_posix() if path.is_absolute() and path.is_relative_to(_PACKAGES) else file
