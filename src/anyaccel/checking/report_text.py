"""Check report as text for the terminal."""

from __future__ import annotations

import itertools
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from anyaccel.checking.path_text import shorten

if TYPE_CHECKING:
    from anyaccel.checking.report import DeviceReport, Report, Violation

__all__ = ["describe_device", "describe_report", "describe_verdict"]

_SEVERE_EFFECTS = ("error", "wrong")
# Number of source lines listed for a limit that costs only time or precision.
_MAX_LINES = 3
_DEFAULT_WIDTH, _MIN_WIDTH, _MAX_WIDTH = 100, 60, 120


def describe_report(report: Report, width: int | None = None) -> Iterator[str]:
    """Yield a check report as lines of text: each device's verdict and the limits that were hit.

    The most severe limits come first. `width` defaults to the terminal width.
    """
    yield f"{report.target}: {report.pipeline}"
    for note in report.notes:
        yield f"note: {note}"
    for device_report in report.devices.values():
        yield ""
        yield from describe_device(device_report, width)


def describe_verdict(report: DeviceReport) -> str:
    """Return a short verdict, such as `passes` or `would fail: 4 errors`."""
    if not report.finished:
        return f"would fail: {report.error}"
    if not report.runs:
        return f"would fail: {_count(report.of('error'), 'error')}"
    if report.of("wrong"):
        return f"would silently produce a wrong image: {_count(report.of('wrong'), 'silent error')}"
    if not report.is_right:
        return "produces a different image than the CPU"
    return f"passes ({report.known} known findings ignored)" if report.known else "passes"


def describe_device(report: DeviceReport, width: int | None = None) -> Iterator[str]:
    """Yield a device's verdict, its measurements, and each limit with the source lines that hit it."""
    width = width or shutil.get_terminal_size((_DEFAULT_WIDTH, 24)).columns
    width = max(_MIN_WIDTH, min(width, _MAX_WIDTH))
    kind = "virtual" if report.virtual else "hardware"
    yield f"{report.device} ({kind}, {'placed' if report.placed else 'plain diffusers'}): {describe_verdict(report)}"
    if report.max_difference is not None:
        yield f"  largest difference from the CPU: {report.max_difference:.1e}"
        yield f"  device-to-CPU round trips per step: {report.host_round_trips_per_step:.3g}"
    if report.graphs is not None:
        recompiled = len(report.graphs.recompiled_for)
        yield f"  compiled graphs: {report.graphs.compiled}, {recompiled} of them recompiled for another shape"
        yield from (f"  graph break at {position}" for position in report.graphs.breaks)
    violations = _group_by_limit(report.violations)
    for _, group in itertools.groupby(violations, key=lambda violation: (violation.effect, violation.limit)):
        yield from _describe_limit(list(group), width)


def _count(violations: Sequence[Violation], noun: str) -> str:
    # One source line can hit a limit with several operations; people fix lines.
    lines = len({(violation.limit, violation.file, violation.line) for violation in violations})
    return f"{lines} {noun}{'s' if lines != 1 else ''}"


def _group_by_limit(violations: Sequence[Violation]) -> list[Violation]:
    """Return the violations grouped by limit, with the limits in order of first appearance."""
    positions = {violation.limit: index for index, violation in reversed(list(enumerate(violations)))}
    return sorted(violations, key=lambda violation: positions[violation.limit])


def _describe_limit(violations: list[Violation], width: int) -> Iterator[str]:
    first = violations[0]
    yield ""
    yield from _wrap(f"  {first.effect}: {first.limit}: {first.says}", width, 6)
    yield f"      {first.evidence}: {first.source}"
    if first.hint:
        yield from _wrap(f"      hint: {first.hint}", width, 12)
    lines = list({(violation.file, violation.line): violation for violation in violations}.values())
    shown = lines if first.effect in _SEVERE_EFFECTS else lines[:_MAX_LINES]
    for violation in shown:
        step = "" if violation.step is None else f"   [step {violation.step}]"
        yield f"      {shorten(violation.file)}:{violation.line}{step}"
        yield f"          {violation.code}"
    if more := len(lines) - len(shown):
        yield f"      and {more} more line{'s' if more != 1 else ''}, listed by --json"


def _wrap(text: str, width: int, indent: int) -> list[str]:
    # A URL stays on one line, so that it can be clicked and copied.
    return textwrap.wrap(text, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
