"""The chart as a page of Markdown: a table a family, a mark a cell, and what does not work with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from anyaccel.backends.evidence import Verification
from anyaccel.checking.chart.chart import Chart, ChartCell, ChartRow
from anyaccel.checking.chart.known_failures import find_reason

__all__ = ["write_markdown"]

_MARKS = {"works": "✓", "waits": "◷", "wrong": "≠", "stops": "✗"}


def write_markdown(chart: Chart, verifications: tuple[Verification, ...] = (), page: str = "") -> str:
    """The whole page; `page` is the address of the one to click through, where there is one."""
    lines = [*_introduce(chart, page), *_count(chart), *_tell_hardware(chart, verifications)]
    for family, members in groupby(sorted(chart.lines, key=lambda line: line.family), key=lambda line: line.family):
        lines += ["", f"## {family}", "", *_table(chart, list(members))]
    lines += ["", "## What does not work placed, and why", "", *_tell_failures(chart)]
    return "\n".join(lines) + "\n"


def _introduce(chart: Chart, page: str) -> Iterator[str]:
    made = ", ".join(f"{name} {version}" for name, version in chart.made.get("versions", {}).items())
    yield "# Chart: pipelines and devices"
    yield ""
    kinds = len({line.pipeline for line in chart.lines})
    yield f"{len(chart.lines)} tiny pipelines of {kinds} classes of diffusers, in float32, on virtual devices; {made}."
    yield "All of it is **virtual**: the documented limits of a device, enforced on a CPU. It says nothing of kernels."
    yield "In a cell: plain diffusers, then placed by anyaccel."
    if page:
        yield f"[The same to click through]({page}) has every line of code that met a limit."
    yield ""
    yield f"{_MARKS['works']} works: the CPU's picture, and no waiting for the device at the steps;"
    yield f"{_MARKS['waits']} right, but the host waits for the device at every step;"
    yield f"{_MARKS['wrong']} silently another picture; {_MARKS['stops']} stops with an error."


def _count(chart: Chart) -> Iterator[str]:
    yield ""
    yield "| works on | plain diffusers | placed | of |"
    yield "|---|---|---|---|"
    for device in chart.devices:
        plain, placed = chart.count(device, "plain", "works"), chart.count(device, "placed", "works")
        yield f"| {_badge(device)} | {plain} | {placed} | {len(chart.lines)} |"


def _tell_hardware(chart: Chart, verifications: tuple[Verification, ...]) -> Iterator[str]:
    here = {line.recipe for line in chart.lines}
    told = [(one, [found for found in one.pipelines if found.recipe in here]) for one in verifications]
    if not any(found for _, found in told):
        return
    yield ""
    yield "On hardware, as far as somebody ran it (`anyaccel devices NAME --verify`), placed against the CPU:"
    yield ""
    yield "| device | pipelines right | of | date | torch |"
    yield "|---|---|---|---|---|"
    for one, found in told:
        right = sum(pipeline.right is True for pipeline in found)
        yield f"| {one.device_name} | {right} | {len(found)} | {one.date} | {one.versions.get('torch', '')} |"


def _table(chart: Chart, lines: list[ChartRow]) -> Iterator[str]:
    yield f"| pipeline | {' | '.join(chart.devices)} | runs on |"
    yield f"|---|{'---|' * (len(chart.devices) + 1)}"
    for line in lines:
        cells = [_marks(line.cell(device)) for device in chart.devices]
        working = [device for device in chart.devices if line.cell(device).placed.state == "works"]
        yield f"| {line.recipe} `{line.pipeline}` | {' | '.join(cells)} | {' '.join(map(_badge, working))} |"


def _marks(cell: ChartCell) -> str:
    return f"{_MARKS[cell.plain.state]} → {_MARKS[cell.placed.state]}"


def _badge(device: str) -> str:
    return f"![{device}: works (virtual)](badges/{device}.svg)"


def _tell_failures(chart: Chart) -> Iterator[str]:
    failing = [(line, cell) for line in chart.lines for cell in line.cells if cell.placed.state != "works"]
    if not failing:
        yield "Nothing."
    for line, cell in failing:
        why = find_reason(line.recipe) or cell.placed.error or "not yet known why"
        yield f"- **{line.recipe}** on {cell.device} ({cell.placed.state}): {why}"
