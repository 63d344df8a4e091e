"""The chart as JSON and back: lines of code and limits stand in it once, and cells point to them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from anyaccel.backends.claim import Limit
from anyaccel.backends.device import sheet
from anyaccel.backends.evidence import Verification
from anyaccel.checking.chart.chart import Attempt, Chart, ChartCell, ChartRow, CodeLine, LimitFinding
from anyaccel.checking.chart.known_failures import find_reason
from anyaccel.errors import UsageError
from anyaccel.storage.atomic_write import atomic_write

__all__ = ["as_document", "read_chart", "write_chart"]

_FORMAT = 1


def as_document(chart: Chart, verifications: Iterable[Verification] = ()) -> dict[str, Any]:
    """The whole chart in plain values, with everything that a page about it needs."""
    sites = list(dict.fromkeys(found.site for found in _all_found(chart)))
    index = {site: number for number, site in enumerate(sites)}
    return {
        "format": _FORMAT,
        "evidence": "virtual",
        "made": chart.made,
        "seconds": chart.seconds,
        "devices": {name: _describe_device(name, chart) for name in chart.devices},
        "sites": [[site.file, site.line, site.code] for site in sites],
        "lines": [_line_as_dict(line, index) for line in chart.lines],
        "hardware": _describe_hardware(verifications),
    }


def write_chart(chart: Chart, path: Path) -> None:
    """Keep a chart; whoever reads the file meanwhile finds the old one or the new one, and never half of it."""
    atomic_write(path, json.dumps(as_document(chart), separators=(",", ":")) + "\n")


def read_chart(path: Path) -> Chart:
    """A chart that was kept."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["format"] != _FORMAT:
            raise ValueError(f"it has format {document['format']}, and this version reads format {_FORMAT}")
        sites = [CodeLine(*site) for site in document["sites"]]
        limits = {name: device["limits"] for name, device in document["devices"].items()}
        lines = tuple(_read_line(line, sites, limits) for line in document["lines"])
        return Chart(tuple(document["devices"]), lines, document["seconds"], document["made"])
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise UsageError(f"{path} is no chart: {error}", hint=f"anyaccel chart --json > {path}") from error


def _all_found(chart: Chart) -> Iterable[LimitFinding]:
    for line in chart.lines:
        for cell in line.cells:
            yield from cell.plain.found
            yield from cell.placed.found


def _describe_device(name: str, chart: Chart) -> dict[str, Any]:
    """The device, its figures, and those of its limits that some pipeline met."""
    asked = sheet(name)
    known = asked.limits(Limit)
    effects = {
        found.limit: found.effect
        for line in chart.lines
        for attempt in (line.cell(name).plain, line.cell(name).placed)
        for found in attempt.found
    }
    return {
        "title": asked.title,
        "plain": chart.count(name, "plain", "works"),
        "placed": chart.count(name, "placed", "works"),
        "tried": len(chart.lines),
        "limits": {limit: _describe_limit(known.get(limit), effect) for limit, effect in sorted(effects.items())},
    }


def _describe_limit(limit: Limit | None, effect: str) -> dict[str, str]:
    if limit is None:
        return {"effect": effect, "says": "", "source": "", "evidence": "", "hint": ""}
    return {
        "effect": effect,
        "says": limit.says,
        "source": limit.source,
        "evidence": limit.evidence,
        "hint": limit.hint,
    }


def _describe_hardware(verifications: Iterable[Verification]) -> dict[str, list[dict[str, Any]]]:
    """What somebody ran on hardware, by device."""
    hardware: dict[str, list[dict[str, Any]]] = {}
    for one in verifications:
        pipelines = {
            found.recipe: {
                "runs": found.runs,
                "right": found.right,
                "max_difference": found.max_difference,
                "error": found.error,
            }
            for found in one.pipelines
        }
        told = {"name": one.device_name, "date": one.date, "versions": dict(one.versions), "pipelines": pipelines}
        hardware.setdefault(one.device, []).append(told)
    return hardware


def _line_as_dict(line: ChartRow, index: dict[CodeLine, int]) -> dict[str, Any]:
    cells: dict[str, dict[str, Any]] = {}
    for cell in line.cells:
        both = {"plain": _attempt_as_dict(cell.plain, index), "placed": _attempt_as_dict(cell.placed, index)}
        reason = find_reason(line.recipe) if cell.placed.state != "works" else ""
        cells[cell.device] = both | ({"reason": reason} if reason else {})
    return {"recipe": line.recipe, "pipeline": line.pipeline, "family": line.family, "cells": cells}


def _attempt_as_dict(attempt: Attempt, index: dict[CodeLine, int]) -> dict[str, Any]:
    short = {"state": attempt.state, "error": attempt.error} if attempt.error else {"state": attempt.state}
    difference = None if attempt.max_difference is None else float(f"{attempt.max_difference:.2e}")
    waits = None if attempt.waits_a_step is None else round(attempt.waits_a_step, 2)
    found = [[one.limit, index[one.site], one.count, one.step] for one in attempt.found]
    return short | {"max_difference": difference, "waits_a_step": waits, "found": found}


def _read_line(line: dict[str, Any], sites: list[CodeLine], limits: dict[str, Any]) -> ChartRow:
    cells = tuple(
        ChartCell(
            device,
            _read_attempt(cell["plain"], sites, limits[device]),
            _read_attempt(cell["placed"], sites, limits[device]),
        )
        for device, cell in line["cells"].items()
    )
    return ChartRow(line["recipe"], line["pipeline"], line["family"], cells)


def _read_attempt(attempt: dict[str, Any], sites: list[CodeLine], limits: dict[str, Any]) -> Attempt:
    found = tuple(
        LimitFinding(limit, limits[limit]["effect"], sites[site], count, step)
        for limit, site, count, step in attempt["found"]
    )
    difference, waits = attempt["max_difference"], attempt["waits_a_step"]
    return Attempt(attempt["state"], attempt.get("error", ""), difference, waits, found)
