"""A report as a page, for `anyaccel check --html`: the look and the ledger are the chart's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anyaccel.backends.device import sheet
from anyaccel.checking.chart.page import fill_page
from anyaccel.checking.paths import shorten
from anyaccel.checking.report import DeviceReport, Report

__all__ = ["write_report_page"]


def write_report_page(report: Report, made: Mapping[str, Any] | None = None) -> str:
    """The page of one subject on some devices; `made` says when and with what: `{"versions": {"torch": "2.13.0"}}`."""
    devices = {name: _describe(one) for name, one in report.devices.items()}
    return fill_page(
        "report.html",
        report.as_dict() | {"devices": devices, "made": dict(made or {})},
        title=f"anyaccel check: {report.subject}",
    )


def _describe(one: DeviceReport) -> dict[str, Any]:
    whole = one.as_dict()
    for violation in whole["violations"]:
        violation["file"] = shorten(violation["file"])
    return whole | {"title": sheet(one.device).title}
