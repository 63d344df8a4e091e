"""Reports for CI: GitHub annotations on the lines of a pull request, and SARIF."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from anyaccel.backends.claim import Effect
from anyaccel.checking.path_text import shorten
from anyaccel.checking.report import TOLERANCE, DeviceReport, Report, Violation

__all__ = ["as_github", "as_sarif"]

_GITHUB_LEVELS: dict[Effect, str] = {"error": "error", "wrong": "error", "narrowed": "notice", "slow": "notice"}
_SARIF_LEVELS: dict[Effect, str] = {"error": "error", "wrong": "error", "narrowed": "note", "slow": "note"}
# Rule id of failures without a line. Code scanning matches alerts of different runs by rule id, so it must not change.
_FAILURE_RULE = "picture"
_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def as_github(report: Report) -> Iterator[str]:
    """Yield GitHub workflow commands, which GitHub displays as annotations on the lines of code."""
    for device, violation in _unique_lines(report):
        message = f"{_label(device)}: {violation.says}"
        if violation.hint:
            message += f" hint: {violation.hint}"
        file, title = _escape(shorten(violation.file), ",:"), _escape(violation.limit, ",:")
        location = f"file={file},line={violation.line},title={title}"
        yield f"::{_GITHUB_LEVELS[violation.effect]} {location}::{_escape(message)}"
    for device, message in _failures(report):
        yield f"::error title={_escape(report.target, ',:')}::{_escape(f'{_label(device)}: {message}')}"


def _failures(report: Report) -> Iterator[tuple[DeviceReport, str]]:
    """Yield the failures that cannot be attributed to a line of code, each with its device report."""
    for device in report.devices.values():
        if not device.finished:
            yield device, f"stops: {device.error}"
        elif device.max_difference is None:
            yield device, "the image has a different shape than the CPU's"
        elif device.max_difference > TOLERANCE:
            yield device, f"wrong image: it differs from the CPU's by {device.max_difference:.1e}"


def _unique_lines(report: Report) -> Iterator[tuple[DeviceReport, Violation]]:
    """Yield each line of code once per device and limit, even if multiple operations on it hit the limit."""
    for device in report.devices.values():
        seen = set()
        for violation in device.violations:
            key = (violation.limit, violation.file, violation.line)
            if key not in seen:
                seen.add(key)
                yield device, violation


def _label(device: DeviceReport) -> str:
    return f"{device.device} ({'virtual' if device.virtual else 'hardware'})"


def _escape(text: str, extra: str = "") -> str:
    """Escape a value for a GitHub workflow command; `extra` contains additional characters to escape."""
    # GitHub does not document the escapes: https://github.com/github/docs/issues/11713. The percent sign comes first,
    # because each later replacement inserts one.
    for character in f"%\r\n{extra}":
        text = text.replace(character, f"%{ord(character):02X}")
    return text


def as_sarif(report: Report) -> str:
    """Return the report as SARIF 2.1.0, the exchange format for code scanners."""
    findings = list(_unique_lines(report))
    rules = {violation.limit: violation for _, violation in findings}
    results = [_make_result(device, violation, list(rules)) for device, violation in findings]
    results += [_make_failure(device, message) for device, message in _failures(report)]
    driver = {"name": "anyaccel", "rules": [*(_make_rule(rule) for rule in rules.values()), {"id": _FAILURE_RULE}]}
    run = {"tool": {"driver": driver}, "results": results}
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2)


def _make_failure(device: DeviceReport, message: str) -> dict[str, Any]:
    return {
        "ruleId": _FAILURE_RULE,
        "level": "error",
        "message": {"text": f"{_label(device)}: {message}"},
        "properties": {"device": device.device, "virtual": device.virtual},
    }


def _make_rule(violation: Violation) -> dict[str, Any]:
    rule: dict[str, Any] = {"id": violation.limit, "shortDescription": {"text": violation.limit}}
    return rule | ({"helpUri": violation.source} if violation.source else {})


def _make_result(device: DeviceReport, violation: Violation, rules: list[str]) -> dict[str, Any]:
    location = {
        "artifactLocation": {"uri": shorten(violation.file)},
        # SARIF lines start at 1; 0 is a violation without a known line.
        "region": {"startLine": max(1, violation.line), "snippet": {"text": violation.code}},
    }
    return {
        "ruleId": violation.limit,
        "ruleIndex": rules.index(violation.limit),
        "level": _SARIF_LEVELS[violation.effect],
        "message": {"text": f"{_label(device)}: {violation.says} {violation.hint}".strip()},
        "locations": [{"physicalLocation": location}],
        "properties": {"device": device.device, "virtual": device.virtual, "effect": violation.effect},
    }
