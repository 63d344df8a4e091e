"""`anyaccel chart`: runs every tiny pipeline on every virtual device and reports the results."""

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
from anyaccel.storage.atomic_write import atomic_write, check_output_folder
from anyaccel.storage.file_lock import lock_file

if TYPE_CHECKING:
    from anyaccel.checking.chart.chart import Chart, ChartRow
    from anyaccel.recipes import Recipe

__all__ = ["describe_environment", "show_chart"]


def show_chart(
    family: Annotated[
        list[str] | None,
        typer.Option("--family", help="Family or recipe to run; repeat for several. Default: all."),
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option("--device", "-d", help="Virtual device to run on; repeat for several. Default: all."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="PATH", help="Also write a self-contained HTML page.")
    ] = None,
    markdown: Annotated[
        Path | None,
        typer.Option("--markdown", metavar="PATH", help="Also write a Markdown page, and badge images next to it."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            "--keep",
            metavar="FILE",
            help="Save the result of each finished pipeline to this file, and resume from it if it exists.",
        ),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", help="Number of processes. Default: the number of CPU cores.")
    ] = None,
) -> None:
    """Run every tiny pipeline on every virtual device.

    Each pipeline runs twice: once with stock diffusers and once with anyaccel. A full run takes 15 to
    30 minutes on two cores. The exit status is 1 if a pipeline fails with anyaccel for an unknown reason.
    """
    if jobs is not None and jobs < 1:
        raise UsageError(f"--jobs must be at least 1, not {jobs}", hint="for example --jobs 2")
    # Checked first: a missing folder must not discard the results of a long run.
    for path in (html, markdown, checkpoint):
        if path:
            check_output_folder(path)
    # One process per core: more threads would only compete. torch reads the variable when it is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from anyaccel.checking.chart.chart import find_families
    from anyaccel.checking.check import find_devices
    from anyaccel.recipes import recipes

    selected = find_families(family or [], recipes().values())
    with cleanup_on_exit() as display, _lock_checkpoint(checkpoint):
        chart = _run(selected, find_devices(device or "all"), checkpoint, jobs or os.cpu_count() or 1, display)
    _write_pages(chart, html, markdown)
    if as_json:
        print(json.dumps(_as_document(chart), separators=(",", ":")))
    else:
        print("\n".join(_format_table(chart)))
    if any(_has_unknown_failure(row) for row in chart.rows):
        raise typer.Exit(1)


def _run(selected: list[Recipe], devices: list[str], checkpoint: Path | None, jobs: int, display: Display) -> Chart:
    """Run the selected recipes and return the chart, reusing the rows saved in the checkpoint."""
    from anyaccel.checking.chart.chart import Chart, make_chart
    from anyaccel.checking.chart.chart_json import write_chart

    environment = describe_environment()
    saved_rows, saved_seconds = _read_checkpoint(checkpoint, environment, devices)
    rows = {row.recipe: row for row in saved_rows}
    remaining = [recipe for recipe in selected if recipe.name not in rows]
    start = time.monotonic()

    def collect(names: Iterable[str]) -> Chart:
        finished = tuple(rows[name] for name in names if name in rows)
        return Chart(tuple(devices), finished, round(saved_seconds + time.monotonic() - start, 1), environment)

    from anyaccel.recipes import recipes

    display.start_phase(f"Running {len(remaining)} pipelines on {len(devices)} devices")
    try:
        # Closing the generator ends its worker processes, also after Ctrl-C.
        with closing(make_chart(remaining, devices, jobs=jobs, on_progress=display.update_count)) as new_rows:
            for row in new_rows:
                rows[row.recipe] = row
                if checkpoint:
                    # All rows, not only the selected ones: a run with --family must not drop the others.
                    write_chart(collect(recipes()), checkpoint)
    except (KeyboardInterrupt, TerminatedError):
        if checkpoint:
            display.print_line(f"saved {len(rows)} pipelines to {checkpoint}; run the same command again to resume")
        raise
    return collect(recipe.name for recipe in selected)


def _read_checkpoint(
    checkpoint: Path | None, environment: dict[str, Any], devices: list[str]
) -> tuple[tuple[ChartRow, ...], float]:
    """Return the rows saved in the checkpoint and their total run time in seconds.

    Raise if the checkpoint was saved with different package versions or devices.
    """
    from anyaccel.checking.chart.chart_json import read_chart

    if checkpoint is None or not checkpoint.exists():
        return (), 0.0
    saved = read_chart(checkpoint)
    # A chart has one list of versions and devices, so rows of other versions cannot be added to it.
    difference = ""
    if saved.devices != tuple(devices):
        difference = f"the devices {', '.join(saved.devices)}, not {', '.join(devices)}"
    elif saved.environment.get("versions") != environment["versions"]:
        difference = "package versions that differ from the installed ones"
    if difference:
        raise UsageError(
            f"{checkpoint} was saved with {difference}", hint="delete the file, or pass a different file to --keep"
        )
    return saved.rows, saved.seconds


def _lock_checkpoint(checkpoint: Path | None) -> AbstractContextManager[object]:
    """Return a context manager that locks the checkpoint against writes by other processes."""
    if checkpoint is None:
        return nullcontext()
    # The lock file is never removed: a process that has just opened it would lock an unlinked file, and a third
    # process would create and lock a new one.
    return lock_file(
        checkpoint.with_name(f".{checkpoint.name}.lock"),
        f"another process is saving a chart to {checkpoint}",
        "wait until it finishes, or pass a different file to --keep",
    )


def describe_environment() -> dict[str, Any]:
    """Return the date, the system and the package versions for a report."""
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
    from anyaccel.backends.evidence_files import load_verifications
    from anyaccel.checking.chart.chart_json import as_document

    return as_document(chart, load_verifications().values())


def _write_pages(chart: Chart, html: Path | None, markdown: Path | None) -> None:
    from anyaccel.backends.evidence_files import load_verifications
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


def _format_table(chart: Chart) -> list[str]:
    from anyaccel.checking.chart.known_failures import find_reason

    lines = [f"{'device':10}{'pipelines':>10}{'plain diffusers':>18}{'placed':>9}     (working; virtual devices)"]
    for device in chart.devices:
        plain, placed = chart.count(device, "plain", "works"), chart.count(device, "placed", "works")
        lines.append(f"{device:10}{len(chart.rows):10}{plain:18}{placed:9}")
    for row in chart.rows:
        for cell in row.cells:
            if cell.placed.state != "works":
                reason = find_reason(row.recipe) or cell.placed.error or "unknown reason"
                lines.append(f"{row.recipe} on {cell.device} {cell.placed.state}: {reason}")
    return lines


def _has_unknown_failure(row: ChartRow) -> bool:
    from anyaccel.checking.chart.known_failures import find_reason

    return any(cell.placed.state != "works" and not find_reason(row.recipe) for cell in row.cells)
