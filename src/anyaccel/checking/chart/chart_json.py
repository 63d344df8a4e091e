"""JSON file format for the chart.

Each line of code and each limit is stored only once; cells refer to them by index or name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from anyaccel.backends.claim import Limit
from anyaccel.backends.device import sheet
from anyaccel.backends.evidence_files import Verification
from anyaccel.checking.chart.chart import Attempt, Chart, ChartCell, ChartRow, CodeLine, LimitFinding
from anyaccel.checking.chart.known_failures import find_reason
from anyaccel.errors import UsageError, summarize_error
from anyaccel.storage.atomic_write import atomic_write

__all__ = ["as_document", "read_chart", "write_chart"]

# Version of the file format, incremented when older files become unreadable.
_FORMAT = 1


def as_document(chart: Chart, verifications: Iterable[Verification] = ()) -> dict[str, Any]:
    """Return the chart as a JSON-serializable dict with all data for the HTML page."""
    sites = list(dict.fromkeys(finding.site for finding in _all_findings(chart)))
    index = {site: position for position, site in enumerate(sites)}
    return {
        "format": _FORMAT,
        "evidence": "virtual",
        "made": chart.environment,
        "seconds": chart.seconds,
        "devices": {name: _describe_device(name, chart) for name in chart.devices},
        "sites": [[site.file, site.line, site.code] for site in sites],
        "lines": [_row_as_dict(row, index) for row in chart.rows],
        "hardware": _describe_hardware(verifications),
    }


def write_chart(chart: Chart, path: Path) -> None:
    """Write a chart atomically, so that concurrent readers see either the old or the new file."""
    atomic_write(path, json.dumps(as_document(chart), separators=(",", ":")) + "\n")


def read_chart(path: Path) -> Chart:
    """Read a chart written by `write_chart`; raise if the file is not a valid chart."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["format"] != _FORMAT:
            raise ValueError(f"unsupported format {document['format']} (supported: {_FORMAT})")
        sites = [CodeLine(*site) for site in document["sites"]]
        limits = {name: device["limits"] for name, device in document["devices"].items()}
        rows = tuple(_read_row(row, sites, limits) for row in document["lines"])
        return Chart(tuple(document["devices"]), rows, document["seconds"], document["made"])
    # Any of these means that the file is damaged or is not a chart.
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise UsageError(
            f"cannot read {path} as a chart: {summarize_error(error)}",
            hint=f"create one with `anyaccel chart --json > {path}`",
        ) from error


def _all_findings(chart: Chart) -> Iterable[LimitFinding]:
    for row in chart.rows:
        for cell in row.cells:
            yield from cell.plain.findings
            yield from cell.placed.findings


def _describe_device(name: str, chart: Chart) -> dict[str, Any]:
    """Return a device's title, how many pipelines work on it, and the limits that pipelines hit."""
    device = sheet(name)
    limits = device.limits(Limit)
    effects = {
        finding.limit: finding.effect
        for row in chart.rows
        for attempt in (row.cell(name).plain, row.cell(name).placed)
        for finding in attempt.findings
    }
    return {
        "title": device.title,
        "plain": chart.count(name, "plain", "works"),
        "placed": chart.count(name, "placed", "works"),
        "tried": len(chart.rows),
        "limits": {limit: _describe_limit(limits.get(limit), effect) for limit, effect in sorted(effects.items())},
    }


def _describe_limit(limit: Limit | None, effect: str) -> dict[str, str]:
    if limit is None:  # the chart was computed with another version of the sheet
        return {"effect": effect, "says": "", "source": "", "evidence": "", "hint": ""}
    return {
        "effect": effect,
        "says": limit.says,
        "source": limit.source,
        "evidence": limit.evidence,
        "hint": limit.hint,
    }


def _describe_hardware(verifications: Iterable[Verification]) -> dict[str, list[dict[str, Any]]]:
    """Return the verification results for pipelines on real hardware, grouped by device."""
    hardware: dict[str, list[dict[str, Any]]] = {}
    for verification in verifications:
        pipelines = {
            finding.recipe: {
                "runs": finding.runs,
                "right": finding.right,
                "max_difference": finding.max_difference,
                "error": finding.error,
            }
            for finding in verification.pipelines
        }
        machine = {
            "name": verification.device_name,
            "date": verification.date,
            "versions": dict(verification.versions),
            "pipelines": pipelines,
        }
        hardware.setdefault(verification.device, []).append(machine)
    return hardware


def _row_as_dict(row: ChartRow, index: dict[CodeLine, int]) -> dict[str, Any]:
    cells: dict[str, dict[str, Any]] = {}
    for cell in row.cells:
        modes = {"plain": _attempt_as_dict(cell.plain, index), "placed": _attempt_as_dict(cell.placed, index)}
        # Reasons are computed when the chart is shown, so that a new text applies to recorded charts too.
        reason = find_reason(row.recipe) if cell.placed.state != "works" else ""
        cells[cell.device] = modes | ({"reason": reason} if reason else {})
    return {"recipe": row.recipe, "pipeline": row.pipeline, "family": row.family, "cells": cells}


def _attempt_as_dict(attempt: Attempt, index: dict[CodeLine, int]) -> dict[str, Any]:
    outcome = {"state": attempt.state, "error": attempt.error} if attempt.error else {"state": attempt.state}
    # Rounded, so that the file stays small and does not change with the last digits.
    difference = None if attempt.max_difference is None else float(f"{attempt.max_difference:.2e}")
    waits = None if attempt.waits_per_step is None else round(attempt.waits_per_step, 2)
    findings = [[finding.limit, index[finding.site], finding.count, finding.step] for finding in attempt.findings]
    return outcome | {"max_difference": difference, "waits_a_step": waits, "found": findings}


def _read_row(row: dict[str, Any], sites: list[CodeLine], limits: dict[str, Any]) -> ChartRow:
    cells = tuple(
        ChartCell(
            device,
            _read_attempt(cell["plain"], sites, limits[device]),
            _read_attempt(cell["placed"], sites, limits[device]),
        )
        for device, cell in row["cells"].items()
    )
    return ChartRow(row["recipe"], row["pipeline"], row["family"], cells)


def _read_attempt(attempt: dict[str, Any], sites: list[CodeLine], limits: dict[str, Any]) -> Attempt:
    findings = tuple(
        LimitFinding(limit, limits[limit]["effect"], sites[site], count, step)
        for limit, site, count, step in attempt["found"]
    )
    difference, waits = attempt["max_difference"], attempt["waits_a_step"]
    return Attempt(attempt["state"], attempt.get("error", ""), difference, waits, findings)
