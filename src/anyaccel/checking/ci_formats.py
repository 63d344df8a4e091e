"""A report for other programs: annotations of GitHub's on the lines of a pull request, and SARIF."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from anyaccel.backends.claim import Effect
from anyaccel.checking.paths import shorten
from anyaccel.checking.report import TOLERANCE, DeviceReport, Report, Violation

__all__ = ["as_github", "as_sarif"]

_GITHUB: dict[Effect, str] = {"error": "error", "wrong": "error", "narrowed": "notice", "slow": "notice"}
_SARIF: dict[Effect, str] = {"error": "error", "wrong": "error", "narrowed": "note", "slow": "note"}
_FAILURE = "picture"
_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def as_github(report: Report) -> Iterator[str]:
    """A line for each place, which GitHub shows beside the code."""
    for device, one in _places(report):
        words = f"{_label(device)}: {one.says} hint: {one.hint}" if one.hint else f"{_label(device)}: {one.says}"
        place = f"file={_escape(shorten(one.file), ',:')},line={one.line},title={_escape(one.limit, ',:')}"
        yield f"::{_GITHUB[one.effect]} {place}::{_escape(words)}"
    for device, words in _failures(report):
        yield f"::error title={_escape(report.subject, ',:')}::{_escape(f'{_label(device)}: {words}')}"


def _failures(report: Report) -> Iterator[tuple[DeviceReport, str]]:
    """What is wrong with a device as a whole, and with no line of code."""
    for device in report.devices.values():
        if not device.finished:
            yield device, f"stops: {device.error}"
        elif device.max_difference is None:
            yield device, "the picture has another shape than the CPU's"
        elif device.max_difference > TOLERANCE:
            yield device, f"another picture: it differs from the CPU's by {device.max_difference:.1e}"


def _places(report: Report) -> Iterator[tuple[DeviceReport, Violation]]:
    """Each line of code once for a device and a limit."""
    for device in report.devices.values():
        seen = set()
        for one in device.violations:
            place = (one.limit, one.file, one.line)
            if place not in seen:
                seen.add(place)
                yield device, one


def _label(device: DeviceReport) -> str:
    return f"{device.device} ({'virtual' if device.virtual else 'hardware'})"


def _escape(text: str, more: str = "") -> str:
    """As GitHub's commands want it: percent signs, ends of lines and, in properties, commas and colons."""
    for letter in f"%\r\n{more}":
        text = text.replace(letter, f"%{ord(letter):02X}")
    return text


def as_sarif(report: Report) -> str:
    """The report in the format that code scanners share (SARIF 2.1.0)."""
    places = list(_places(report))
    rules = {one.limit: one for _, one in places}
    results = [_as_result(device, one, list(rules)) for device, one in places]
    results += [_as_failure(device, words) for device, words in _failures(report)]
    driver = {"name": "anyaccel", "rules": [*(_as_rule(one) for one in rules.values()), {"id": _FAILURE}]}
    run = {"tool": {"driver": driver}, "results": results}
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2)


def _as_failure(device: DeviceReport, words: str) -> dict[str, Any]:
    return {
        "ruleId": _FAILURE,
        "level": "error",
        "message": {"text": f"{_label(device)}: {words}"},
        "properties": {"device": device.device, "virtual": device.virtual},
    }


def _as_rule(one: Violation) -> dict[str, Any]:
    rule: dict[str, Any] = {"id": one.limit, "shortDescription": {"text": one.limit}}
    return rule | ({"helpUri": one.source} if one.source else {})


def _as_result(device: DeviceReport, one: Violation, rules: list[str]) -> dict[str, Any]:
    place = {
        "artifactLocation": {"uri": shorten(one.file)},
        "region": {"startLine": max(1, one.line), "snippet": {"text": one.code}},
    }
    return {
        "ruleId": one.limit,
        "ruleIndex": rules.index(one.limit),
        "level": _SARIF[one.effect],
        "message": {"text": f"{_label(device)}: {one.says} {one.hint}".strip()},
        "locations": [{"physicalLocation": place}],
        "properties": {"device": device.device, "virtual": device.virtual, "effect": one.effect},
    }
