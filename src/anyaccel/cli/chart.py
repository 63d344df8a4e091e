"""`anyaccel chart`: every tiny pipeline on every virtual device, plain and placed, as a table, a page or data."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, closing, nullcontext
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anyaccel.cli.interrupts import cleanup_on_exit
from anyaccel.cli.progress import Display
from anyaccel.errors import UsageError
from anyaccel.processes.signals import TerminatedError
from anyaccel.storage.atomic_write import atomic_write
from anyaccel.storage.file_lock import lock_file

if TYPE_CHECKING:
    from anyaccel.checking.chart.chart import Chart, ChartRow
    from anyaccel.recipes import Recipe

__all__ = ["describe_making", "show_chart"]


def show_chart(
    family: Annotated[
        list[str] | None, typer.Option("--family", help="A family or a recipe; give it several times for several.")
    ] = None,
    device: Annotated[list[str] | None, typer.Option("--device", "-d", help="A device; all without it.")] = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="PATH", help="Write one self-contained page.")] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", metavar="PATH", help="Write a page of Markdown, and badges beside it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    keep: Annotated[
        Path | None,
        typer.Option("--keep", metavar="FILE", help="Keep each pipeline here as it is done, and go on from there."),
    ] = None,
    jobs: Annotated[int | None, typer.Option("--jobs", help="How many processes; as many as cores without it.")] = None,
) -> None:
    """Run every tiny pipeline on every virtual device, in plain diffusers and placed: about a quarter of an hour.

    Exit status 1 where a pipeline does not work placed and nobody knows why.
    """
    if jobs is not None and jobs < 1:
        raise UsageError(f"at least one process is needed, not {jobs}", hint="for example --jobs 2")
    for path in (html, markdown, keep):
        if path and not path.absolute().parent.is_dir():
            raise UsageError(f"there is no folder {path.absolute().parent}", hint="make it first")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # each process has one core
    from anyaccel.checking.chart.chart import find_families
    from anyaccel.checking.check import find_devices
    from anyaccel.recipes import recipes

    chosen = find_families(family or [], recipes().values())
    with cleanup_on_exit() as display, _holding(keep):
        chart = _run(chosen, find_devices(device or "all"), keep, jobs or os.cpu_count() or 1, display)
    _write_pages(chart, html, markdown)
    if as_json:
        print(json.dumps(_as_document(chart), separators=(",", ":")))
    else:
        print("\n".join(_describe(chart)))
    if any(_is_unexplained(line) for line in chart.lines):
        raise typer.Exit(1)


def _run(chosen: list[Recipe], devices: list[str], keep: Path | None, jobs: int, display: Display) -> Chart:
    """The chart, from what was kept and what is still to be run; what is kept of other pipelines stays there."""
    from anyaccel.checking.chart.chart import Chart, make_chart
    from anyaccel.checking.chart.chart_file import write_chart

    made = describe_making()
    kept, before = _read_kept(keep, made, devices)
    lines = {line.recipe: line for line in kept}
    left = [recipe for recipe in chosen if recipe.name not in lines]
    begun = time.monotonic()

    def make(names: Iterable[str]) -> Chart:
        found = tuple(lines[name] for name in names if name in lines)
        return Chart(tuple(devices), found, round(before + time.monotonic() - begun, 1), made)

    from anyaccel.recipes import recipes

    display.begin(f"{len(left)} pipelines on {len(devices)} devices")
    try:
        with closing(make_chart(left, devices, jobs=jobs, told=display.count)) as new_lines:
            for line in new_lines:
                lines[line.recipe] = line
                if keep:
                    write_chart(make(recipes()), keep)
    except (KeyboardInterrupt, TerminatedError):
        if keep:
            display.say(f"{len(lines)} pipelines are kept in {keep}; the same command goes on from there")
        raise
    return make(recipe.name for recipe in chosen)


def _read_kept(keep: Path | None, made: dict[str, Any], devices: list[str]) -> tuple[tuple[ChartRow, ...], float]:
    from anyaccel.checking.chart.chart_file import read_chart

    if keep is None or not keep.exists():
        return (), 0.0
    kept = read_chart(keep)
    if kept.made.get("versions") != made["versions"] or kept.devices != tuple(devices):
        raise UsageError(f"{keep} is of other versions or devices", hint="delete it, or keep the chart elsewhere")
    return kept.lines, kept.seconds


def _holding(keep: Path | None) -> AbstractContextManager[object]:
    """Let no other chart write to the same file meanwhile."""
    if keep is None:
        return nullcontext()
    # The lock file stays: if it were removed, a process that has just opened it would lock a file without a name.
    return lock_file(
        keep.with_name(f".{keep.name}.lock"),
        f"another chart is being kept in {keep}",
        "wait for it, or use another FILE",
    )


def describe_making() -> dict[str, Any]:
    """The date, the versions and the machine, for a page that says how it was made."""
    import anyaccel
    from anyaccel.backends.device import this_machine

    machine = this_machine()
    versions = {"anyaccel": anyaccel.__version__, **machine.versions}
    return {
        "date": date.today().isoformat(),
        "system": f"{machine.system} {machine.architecture}",
        "versions": versions,
    }


def _as_document(chart: Chart) -> dict[str, Any]:
    from anyaccel.backends.evidence import load_verifications
    from anyaccel.checking.chart.chart_file import as_document

    return as_document(chart, load_verifications().values())


def _write_pages(chart: Chart, html: Path | None, markdown: Path | None) -> None:
    from anyaccel.backends.evidence import load_verifications
    from anyaccel.checking.chart.badge import make_badge
    from anyaccel.checking.chart.markdown import write_markdown
    from anyaccel.checking.chart.page import write_page

    if html:
        atomic_write(html, write_page(_as_document(chart)))
    if markdown:
        atomic_write(markdown, write_markdown(chart, tuple(load_verifications().values())))
    for page in (html, markdown):
        if page:
            badges = page.absolute().parent / "badges"
            badges.mkdir(exist_ok=True)
            for device in chart.devices:
                atomic_write(badges / f"{device}.svg", make_badge(device, "works (virtual)", "works"))


def _describe(chart: Chart) -> list[str]:
    from anyaccel.checking.chart.known_failures import find_reason

    lines = [f"{'device':10}{'pipelines':>10}{'plain diffusers':>18}{'placed':>9}     (how many work; virtual)"]
    for device in chart.devices:
        plain, placed = chart.count(device, "plain", "works"), chart.count(device, "placed", "works")
        lines.append(f"{device:10}{len(chart.lines):10}{plain:18}{placed:9}")
    for line in chart.lines:
        for cell in line.cells:
            if cell.placed.state != "works":
                why = find_reason(line.recipe) or cell.placed.error or "nobody knows why yet"
                lines.append(f"{line.recipe} on {cell.device} {cell.placed.state}: {why}")
    return lines


def _is_unexplained(line: ChartRow) -> bool:
    from anyaccel.checking.chart.known_failures import find_reason

    return any(cell.placed.state != "works" and not find_reason(line.recipe) for cell in line.cells)
