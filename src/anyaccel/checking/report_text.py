"""A report in words."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from anyaccel.checking.paths import shorten

if TYPE_CHECKING:
    from anyaccel.checking.report import DeviceReport, Report, Violation

__all__ = ["describe_device", "describe_report", "describe_verdict"]

_SHOWN_WHOLE = ("error", "wrong")
_SHOWN = 3
"""Lines of a limit that costs time or width, and breaks nothing."""


def describe_report(report: Report) -> Iterator[str]:
    """Line by line: the verdict of each device, and then what is to be mended there."""
    yield f"{report.subject}: {report.pipeline}"
    for note in report.notes:
        yield f"note: {note}"
    for one in report.devices.values():
        yield ""
        yield from describe_device(one)


def describe_verdict(one: DeviceReport) -> str:
    """`passes`, or why not, in a few words."""
    if not one.finished:
        return f"stops: {one.error}"
    if not one.runs:
        return "does not run"
    if one.of("wrong"):
        return "silently wrong"
    if not one.is_right:
        return "another picture"
    return f"nothing new; {one.known} findings are known" if one.known else "passes"


def describe_device(one: DeviceReport) -> Iterator[str]:
    """The verdict of one device, its figures, and its violations: a limit, and below it the lines that meet it."""
    kind, way = "virtual" if one.virtual else "hardware", "placed" if one.placed else "plain diffusers"
    yield f"{one.device} ({kind}, {way}): {describe_verdict(one)}"
    if one.max_difference is not None:
        trips = f"{one.host_round_trips_per_step:.3g} host round trips a step"
        yield f"  largest difference from the CPU {one.max_difference:.1e}, {trips}"
    if one.graphs is not None:
        yield f"  {one.graphs.compiled} graphs, {len(one.graphs.recompiled_for)} of them for other shapes"
        yield from (f"  a graph breaks at {where}" for where in one.graphs.breaks)
    for _, group in itertools.groupby(_by_limit(one.violations), key=lambda found: (found.effect, found.limit)):
        yield from _describe_limit(list(group))


def _by_limit(violations: Sequence[Violation]) -> list[Violation]:
    """Those of one limit together, in the order in which the worst of each comes."""
    places = {one.limit: place for place, one in reversed(list(enumerate(violations)))}
    return sorted(violations, key=lambda one: places[one.limit])


def _describe_limit(found: list[Violation]) -> Iterator[str]:
    first = found[0]
    yield f"  {first.effect}: {first.limit}: {first.says} ({first.evidence}: {first.source})"
    if first.hint:
        yield f"      hint: {first.hint}"
    lines = {(one.file, one.line): one for one in found}
    shown = list(lines.values()) if first.effect in _SHOWN_WHOLE else list(lines.values())[:_SHOWN]
    for one in shown:
        step = "" if one.step is None else f"   [step {one.step}]"
        yield f"      {shorten(one.file)}:{one.line}  {one.code}{step}"
    if len(shown) < len(lines):
        yield f"      and {len(lines) - len(shown)} lines more; --json has them"
