"""Baselines: earlier reports with accepted findings, so that a check fails only on new findings."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from anyaccel.checking.report import DeviceReport, Report, Violation
from anyaccel.errors import UsageError, summarize_error

__all__ = ["drop_known_findings", "read_baseline"]

# Device, limit, file name and source text. No line number, because edits above a line move it.
FindingKey = tuple[str, str, str, str]


def read_baseline(path: str) -> Counter[FindingKey]:
    """Read the JSON report at `path` and return the number of occurrences of each finding."""
    try:
        devices = json.loads(Path(path).read_text(encoding="utf-8"))["devices"]
        return Counter(_make_key(name, entry) for name, device in devices.items() for entry in device["violations"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"cannot read {path} as a check report: {summarize_error(error)}",
            hint=f"create one with `anyaccel check MODEL --json > {path}`",
        ) from error


def _make_key(device: str, entry: dict[str, Any]) -> FindingKey:
    # The file name without its folder: the baseline may come from another checkout.
    return device, str(entry["limit"]), Path(str(entry["file"])).name, str(entry["code"])


def drop_known_findings(report: Report, baseline: Counter[FindingKey]) -> Report:
    """Return the report without the findings in the baseline.

    Wrong images and failed runs are always reported.
    """
    remaining = Counter(baseline)
    devices = {name: _drop_known(device, remaining) for name, device in report.devices.items()}
    count = sum(len(device.violations) for device in report.devices.values())
    count -= sum(len(device.violations) for device in devices.values())
    notes = (*report.notes, f"findings hidden by the baseline: {count}") if count else report.notes
    return replace(report, devices=devices, notes=notes)


def _drop_known(device: DeviceReport, remaining: Counter[FindingKey]) -> DeviceReport:
    new: list[Violation] = []
    for violation in device.violations:
        key = (device.device, violation.limit, Path(violation.file).name, violation.code)
        # Each baseline entry hides one finding: a second copy of the same line is new.
        if remaining[key] > 0:
            remaining[key] -= 1
        else:
            new.append(violation)
    return replace(device, violations=tuple(new), known=len(device.violations) - len(new))
