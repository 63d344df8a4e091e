"""HTML page for a check report, written by `anyaccel check --html`.

It uses the style sheet and the script of the chart page.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anyaccel.backends.device import sheet
from anyaccel.checking.chart.page import fill_page
from anyaccel.checking.path_text import shorten
from anyaccel.checking.report import DeviceReport, Report

__all__ = ["write_report_page"]


def write_report_page(report: Report, environment: Mapping[str, Any] | None = None) -> str:
    """Return the HTML page for a check report.

    `environment` contains the date and the versions, for example `{"versions": {"torch": "2.13.0"}}`.
    """
    devices = {name: _as_dict(device) for name, device in report.devices.items()}
    return fill_page(
        "report.html",
        report.as_dict() | {"devices": devices, "made": dict(environment or {})},
        title=f"anyaccel check: {report.target}",
    )


def _as_dict(device: DeviceReport) -> dict[str, Any]:
    document = device.as_dict()
    for violation in document["violations"]:
        # A page may be published, so it does not show the folders of this machine.
        violation["file"] = shorten(violation["file"])
    return document | {"title": sheet(device.device).title}
