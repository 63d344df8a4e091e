"""The chart as a page: one file that needs no network and no server, and opens by itself."""

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
_PLACES = re.compile(r"\{\{(title|style|script|data)\}\}")


def write_page(document: Mapping[str, Any]) -> str:
    """The page of a chart, from `kept.as_document(chart)`."""
    return fill_page("chart.html", document, title="anyaccel chart: diffusers pipelines on accelerators")


def fill_page(template: str, data: Mapping[str, Any], title: str) -> str:
    """A template with the shared look, the shared script and its data put in."""
    parts = {
        "title": html.escape(title),
        "style": _read("page.css"),
        "script": _read("page.js"),
        "data": _as_json(data),
    }
    # In one pass: what the data says is never taken for a place.
    return _PLACES.sub(lambda place: parts[place[1]], _read(template))


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _as_json(data: Mapping[str, Any]) -> str:
    """JSON that may stand in a script element: ASCII alone, and no `<` to end the element or to open a comment."""
    text = json.dumps(_without_infinity(data), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _without_infinity(value: Any) -> Any:
    """The same in words where a number is not finite, which JSON cannot say."""
    if isinstance(value, float) and not math.isfinite(value):
        return "not a number" if math.isnan(value) else "infinite"
    if isinstance(value, Mapping):
        return {key: _without_infinity(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_infinity(one) for one in value]
    return value
