"""A badge: a small drawing for a README that says what a check found, `mps | works (virtual)`."""

from __future__ import annotations

import html
import unicodedata

from anyaccel.checking.report import State

__all__ = ["make_badge"]

_COLOURS: dict[State | None, str] = {
    "works": "#00735f",
    "waits": "#8f5a00",
    "wrong": "#8d2f7a",
    "stops": "#b23c0b",
    None: "#5a646c",
}
"""White text on each is readable (4.5 to 1 or better)."""

_LABEL_COLOUR = "#2f363b"
_HEIGHT = 20
_PADDING = 7
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Verdana, 'DejaVu Sans', sans-serif"
_NARROW, _WIDE = frozenset("fijlrtI.,:;'|!()[]{} /"), frozenset("mwMW@%")


def make_badge(label: str, value: str, colour: State | None = None) -> str:
    """An SVG of two parts, the second in the colour of a state: `make_badge("mps", "works (virtual)", "works")`."""
    label, value = _clean(label), _clean(value)
    left, right = (_text_width(text) + 2 * _PADDING for text in (label, value))
    said = html.escape(f"{label}: {value}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="{_HEIGHT}" '
        f'viewBox="0 0 {left + right} {_HEIGHT}" role="img" aria-label="{said}">'
        f"<title>{said}</title>"
        f'<path fill="{_LABEL_COLOUR}" d="M4 0h{left - 4}v{_HEIGHT}h-{left - 4}a4 4 0 0 1-4-4v-12a4 4 0 0 1 4-4z"/>'
        f'<path fill="{_COLOURS[colour]}" d="M{left} 0h{right - 4}a4 4 0 0 1 4 4v12a4 4 0 0 1-4 4h-{right - 4}z"/>'
        f'<g fill="#fff" font-family="{_FONT}" font-size="11">{_text(label, 0, left)}{_text(value, left, right)}</g>'
        "</svg>\n"
    )


def _text(text: str, start: int, width: int) -> str:
    """Text in the middle of its part; `textLength` makes it fit whichever font the reader has."""
    place = f'x="{start + _PADDING}" y="14" textLength="{width - 2 * _PADDING}" lengthAdjust="spacingAndGlyphs"'
    return f"<text {place}>{html.escape(text)}</text>"


def _text_width(text: str) -> int:
    """About how many pixels a text takes at size 11 in a common sans serif."""
    return max(1, round(sum(_letter_width(letter) for letter in text)))


def _letter_width(letter: str) -> float:
    if unicodedata.east_asian_width(letter) in ("W", "F"):
        return 11.0
    if letter in _NARROW:
        return 3.8
    if letter in _WIDE:
        return 9.6
    return 7.4 if letter.isupper() else 6.4


def _clean(text: str) -> str:
    """Without what XML cannot hold."""
    return "".join(letter if letter.isprintable() else " " for letter in text).strip()
