"""Chart as a self-contained HTML file that needs neither a network connection nor a server."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["fill_page", "write_page"]

_FOLDER = Path(__file__).parent
_PLACEHOLDERS = re.compile(r"\{\{(title|style|script|data)\}\}")


def write_page(document: Mapping[str, Any]) -> str:
    """Return the HTML page for the chart dict that `chart_json.as_document` returns."""
    return fill_page("chart.html", document, title="anyaccel chart: diffusers pipelines on accelerators")


def fill_page(template: str, data: Mapping[str, Any], title: str) -> str:
    """Return an HTML template filled with the title, the shared style sheet and script, and the data."""
    values = {
        "title": html.escape(title),
        "style": _read("page.css"),
        "script": _read("page.js"),
        "data": _as_json(data),
    }
    # One pass, so that a placeholder inside the data (a line of code, for example) is not replaced.
    return _PLACEHOLDERS.sub(lambda placeholder: values[placeholder[1]], _read(template))


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _as_json(data: Mapping[str, Any]) -> str:
    """Return JSON that is safe inside a script element: ASCII only, with `<`, `>` and `&` escaped."""
    # `json.dumps` writes ASCII by default, which also escapes U+2028 and U+2029.
    text = json.dumps(_without_infinity(data), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _without_infinity(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not support, with strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return "not a number" if math.isnan(value) else "infinite"
    if isinstance(value, Mapping):
        return {key: _without_infinity(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_infinity(item) for item in value]
    return value
