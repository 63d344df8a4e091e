"""Markdown version of the chart: one table per pipeline family, and the failures with reasons."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from anyaccel.backends.evidence_files import Verification
from anyaccel.checking.chart.chart import Chart, ChartCell, ChartRow
from anyaccel.checking.chart.known_failures import find_reason

__all__ = ["write_markdown"]

# Distinct shapes, because Markdown has no colors.
_MARKS = {"works": "✓", "waits": "◷", "wrong": "≠", "stops": "✗"}


def write_markdown(chart: Chart, verifications: tuple[Verification, ...] = (), page: str = "") -> str:
    """Return the chart as Markdown; `page` is the URL of the interactive page, if there is one."""
    lines = [*_format_introduction(chart, page), *_format_counts(chart), *_format_hardware(chart, verifications)]
    # `groupby` joins only adjacent rows, so the rows are sorted first.
    for family, members in groupby(sorted(chart.rows, key=lambda row: row.family), key=lambda row: row.family):
        lines += ["", f"## {family}", "", *_format_table(chart, list(members))]
    lines += ["", "## Pipelines that do not work when placed", "", *_format_failures(chart)]
    return "\n".join(lines) + "\n"


def _format_introduction(chart: Chart, page: str) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in chart.environment.get("versions", {}).items())
    yield "# Chart: pipelines and devices"
    yield ""
    classes = len({row.pipeline for row in chart.rows})
    yield f"{len(chart.rows)} tiny pipelines ({classes} diffusers classes) in float32 on virtual devices; {versions}."
    yield "All results are **virtual**: the documented limits of a device, enforced on a CPU. They do not test kernels."
    yield "Each cell shows plain diffusers → placed by anyaccel."
    if page:
        yield f"The [interactive chart]({page}) lists every line of code that hits a limit."
    yield ""
    yield f"{_MARKS['works']} works: the same image as the CPU, and no synchronization per step;"
    yield f"{_MARKS['waits']} correct, but the CPU waits for the device at every step;"
    yield f"{_MARKS['wrong']} a different image, without an error; {_MARKS['stops']} stops with an error."


def _format_counts(chart: Chart) -> Iterator[str]:
    yield ""
    yield "| device | works in plain diffusers | works when placed | of |"
    yield "|---|---|---|---|"
    for device in chart.devices:
        plain, placed = chart.count(device, "plain", "works"), chart.count(device, "placed", "works")
        yield f"| {_badge(device)} | {plain} | {placed} | {len(chart.rows)} |"


def _format_hardware(chart: Chart, verifications: tuple[Verification, ...]) -> Iterator[str]:
    # A verification may have run recipes that the chart does not have.
    recipes = {row.recipe for row in chart.rows}
    results = [
        (verification, [finding for finding in verification.pipelines if finding.recipe in recipes])
        for verification in verifications
    ]
    if not any(findings for _, findings in results):
        return
    yield ""
    yield "Verified on hardware (`anyaccel devices NAME --verify`), placed by anyaccel and compared with the CPU:"
    yield ""
    yield "| device | correct pipelines | of | date | torch |"
    yield "|---|---|---|---|---|"
    for verification, findings in results:
        right = sum(finding.right is True for finding in findings)
        torch_version = verification.versions.get("torch", "")
        yield f"| {verification.device_name} | {right} | {len(findings)} | {verification.date} | {torch_version} |"


def _format_table(chart: Chart, rows: list[ChartRow]) -> Iterator[str]:
    yield f"| pipeline | {' | '.join(chart.devices)} | works when placed |"
    yield f"|---|{'---|' * (len(chart.devices) + 1)}"
    for row in rows:
        cells = [_marks(row.cell(device)) for device in chart.devices]
        working = [device for device in chart.devices if row.cell(device).placed.state == "works"]
        yield f"| {row.recipe} `{row.pipeline}` | {' | '.join(cells)} | {' '.join(map(_badge, working))} |"


def _marks(cell: ChartCell) -> str:
    return f"{_MARKS[cell.plain.state]} → {_MARKS[cell.placed.state]}"


def _badge(device: str) -> str:
    return f"![{device}: works (virtual)](badges/{device}.svg)"


def _format_failures(chart: Chart) -> Iterator[str]:
    failing = [(row, cell) for row in chart.rows for cell in row.cells if cell.placed.state != "works"]
    if not failing:
        yield "None."
    for row, cell in failing:
        # A known reason explains more than the error text.
        reason = find_reason(row.recipe) or cell.placed.error or "reason unknown"
        yield f"- **{row.recipe}** on {cell.device} ({cell.placed.state}): {reason}"
