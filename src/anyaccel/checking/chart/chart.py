"""The chart: every tiny pipeline on every virtual device, in plain diffusers and placed, as data."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anyaccel.checking.report import DeviceReport, State, Violation
from anyaccel.checking.run import CheckMode, run_on_device, run_on_host
from anyaccel.errors import UsageError, nearest, summarize_error
from anyaccel.processes.forked_call import forking_threads
from anyaccel.recipes import Recipe

__all__ = ["Attempt", "Chart", "ChartCell", "ChartRow", "CodeLine", "LimitFinding", "find_families", "make_chart"]

_PACKAGES = Path(__file__).parents[3]
_PLAIN, _PLACED = CheckMode(placed=False), CheckMode(placed=True)
_LARGEST_GROUP = 12
"""How many pipelines one process runs: fewer cost more processes, more are lost with one that dies."""


@dataclass(frozen=True)
class CodeLine:
    """One line of code."""

    file: str
    line: int
    code: str


@dataclass(frozen=True)
class LimitFinding:
    """A line of code that met one limit: how often, and the step at which it first did (None: outside of them)."""

    limit: str
    effect: str
    site: CodeLine
    count: int
    step: int | None


@dataclass(frozen=True)
class Attempt:
    """One pipeline on one device, in one of the two ways."""

    state: State
    error: str = ""
    max_difference: float | None = None
    waits_a_step: float | None = None
    found: tuple[LimitFinding, ...] = ()

    def count(self) -> dict[str, int]:
        """How many lines of code met limits, by effect."""
        effects = [one.effect for one in self.found]
        return {effect: effects.count(effect) for effect in dict.fromkeys(effects)}


@dataclass(frozen=True)
class ChartCell:
    """One pipeline on one device, both ways."""

    device: str
    plain: Attempt
    placed: Attempt


@dataclass(frozen=True)
class ChartRow:
    """One pipeline."""

    recipe: str
    pipeline: str
    family: str
    cells: tuple[ChartCell, ...]

    def cell(self, device: str) -> ChartCell:
        """The cell of one device."""
        return next(cell for cell in self.cells if cell.device == device)


@dataclass(frozen=True)
class Chart:
    """Every line, and what it was made with."""

    devices: tuple[str, ...]
    lines: tuple[ChartRow, ...]
    seconds: float
    made: dict[str, Any] = field(default_factory=dict)
    """The date, the versions and the machine."""

    def count(self, device: str, way: str, state: State) -> int:
        """How many pipelines are in one state on one device, `plain` or `placed`."""
        return sum(getattr(line.cell(device), way).state == state for line in self.lines)


OnReport = Callable[[int, int, str], None]
"""Hears how many attempts of how many are made, and of which pipelines the last ones were."""


def find_families(asked: Sequence[str], known: Iterable[Recipe]) -> list[Recipe]:
    """The recipes of the families or names that are asked for; all where none is."""
    recipes = list(known)
    names = {recipe.family for recipe in recipes} | {recipe.name for recipe in recipes}
    for name in asked:
        if name not in names:
            raise UsageError(f"there is no family and no recipe {name!r}", hint=nearest(name, sorted(names)))
    return [one for one in recipes if not asked or one.family in asked or one.name in asked]


def make_chart(
    recipes: Sequence[Recipe], devices: Sequence[str], *, jobs: int = 2, told: OnReport | None = None
) -> Generator[ChartRow, None, None]:
    """Run every recipe on every virtual device, both ways; a line comes as soon as it is whole.

    Closing the generator, or an error in it, ends the processes.
    """
    _import_pipelines(recipes)
    groups = list(_group(recipes))
    done, whole = 0, len(recipes) * len(devices)
    with forking_threads(jobs) as pool:  # a thread waits for the processes of a group
        running = {pool.submit(_run_group, group, devices): group for group in groups}
        for finished in as_completed(running):
            done += len(running[finished]) * len(devices)
            if told:
                told(done, whole, running[finished][0].family)
            yield from finished.result()


def _import_pipelines(recipes: Sequence[Recipe]) -> None:
    """Import once what every process would import anew."""
    diffusers = importlib.import_module("diffusers")
    importlib.import_module("anyaccel.runtime.pipeline")
    for recipe in recipes:
        getattr(diffusers, recipe.pipeline)


def _group(recipes: Sequence[Recipe]) -> Iterator[list[Recipe]]:
    """The recipes of a family together, the largest groups first, so that none is left running alone at the end."""
    families: dict[str, list[Recipe]] = {}
    for recipe in recipes:
        families.setdefault(recipe.family, []).append(recipe)
    parts = [
        whole[start : start + _LARGEST_GROUP]
        for whole in families.values()
        for start in range(0, len(whole), _LARGEST_GROUP)
    ]
    yield from sorted(parts, key=len, reverse=True)


def _run_group(recipes: Sequence[Recipe], devices: Sequence[str]) -> list[ChartRow]:
    expected = run_on_host(recipes)
    cells: dict[str, list[ChartCell]] = {recipe.name: [] for recipe in recipes}
    for device in devices:
        for recipe, cell in zip(recipes, _run_guarded(device, recipes, expected), strict=True):
            cells[recipe.name].append(cell)
    return [
        ChartRow(recipe=one.name, pipeline=one.pipeline, family=one.family, cells=tuple(cells[one.name]))
        for one in recipes
    ]


def _run_guarded(device: str, recipes: Sequence[Recipe], expected: dict[str, Any]) -> list[ChartCell]:
    """The cells of some recipes; where their process dies, each runs in one of its own, and the guilty one says so."""
    try:
        reports = run_on_device(device, recipes, expected, (_PLAIN, _PLACED))
    except CancelledError:  # nobody waits for the chart any more
        raise
    except Exception as error:  # noqa: BLE001 - a process that dies is a finding too
        if len(recipes) > 1:
            return [cell for recipe in recipes for cell in _run_guarded(device, [recipe], expected)]
        died = Attempt("stops", error=summarize_error(error))
        return [ChartCell(device, died, died)]
    pairs = zip(reports[::2], reports[1::2], strict=True)
    return [ChartCell(device, _shorten(plain), _shorten(placed)) for plain, placed in pairs]


def _shorten(report: DeviceReport) -> Attempt:
    return Attempt(
        state=report.state,
        error=report.error,
        max_difference=report.max_difference,
        waits_a_step=report.host_round_trips_per_step,
        found=tuple(_join(report.violations)),
    )


def _join(violations: Sequence[Violation]) -> Iterator[LimitFinding]:
    """One for each line of code and limit, whichever operations of the line met it."""
    together: dict[tuple[str, str, CodeLine], list[Violation]] = {}
    for one in violations:
        site = CodeLine(_name_file(one.file), one.line, one.code)
        together.setdefault((one.limit, one.effect, site), []).append(one)
    for (limit, effect, site), ones in together.items():
        yield LimitFinding(limit, effect, site, sum(one.count for one in ones), ones[0].step)


def _name_file(file: str) -> str:
    """A file of this package as an installed one is named, wherever it lies: `anyaccel/recipes/recipe.py`."""
    path = Path(file)
    return path.relative_to(_PACKAGES).as_posix() if path.is_absolute() and path.is_relative_to(_PACKAGES) else file
