"""A baseline: an earlier report, whose findings are known, so that only new ones are told."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from anyaccel.checking.report import DeviceReport, Report, Violation
from anyaccel.errors import UsageError

__all__ = ["drop_known_failures", "read_baseline"]

Key = tuple[str, str, str, str]


def read_baseline(path: str) -> Counter[Key]:
    """What is known: how many lines of each text meet each limit in each file, on each device.

    A line is known by its text, so that it may move.
    """
    try:
        devices = json.loads(Path(path).read_text(encoding="utf-8"))["devices"]
        return Counter(_key(name, one) for name, device in devices.items() for one in device["violations"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path} is no report of an earlier check: {error}", hint=f"anyaccel check … --json > {path}"
        ) from error


def _key(device: str, one: dict[str, Any]) -> Key:
    return device, str(one["limit"]), Path(str(one["file"])).name, str(one["code"])


def drop_known_failures(report: Report, known: Counter[Key]) -> Report:
    """The report with what is new alone; a picture that is another, and a run that stops, are always told."""
    left = Counter(known)
    devices = {name: _leave_out(one, left) for name, one in report.devices.items()}
    count = sum(len(one.violations) for one in report.devices.values())
    count -= sum(len(one.violations) for one in devices.values())
    notes = (*report.notes, f"{count} findings of the baseline are left out") if count else report.notes
    return replace(report, devices=devices, notes=notes)


def _leave_out(device: DeviceReport, left: Counter[Key]) -> DeviceReport:
    new: list[Violation] = []
    for one in device.violations:
        key = (device.device, one.limit, Path(one.file).name, one.code)
        if left[key] > 0:
            left[key] -= 1
        else:
            new.append(one)
    return replace(device, violations=tuple(new), known=len(device.violations) - len(new))
