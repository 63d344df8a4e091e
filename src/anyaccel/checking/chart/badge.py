"""SVG badge that shows the result of a check in a README: `mps | works (virtual)`."""

from __future__ import annotations

import html
import unicodedata

from anyaccel.checking.report import State

__all__ = ["make_badge"]

# Background by state. White text has a contrast of at least 4.5:1 on each (WCAG AA).
_COLORS: dict[State | None, str] = {
    "works": "#00735f",
    "waits": "#8f5a00",
    "wrong": "#8d2f7a",
    "stops": "#b23c0b",
    None: "#5a646c",
}

_LABEL_COLOR = "#2f363b"
_HEIGHT = 20
_PADDING = 7
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Verdana, 'DejaVu Sans', sans-serif"
# Characters that are much narrower or wider than the others in common sans-serif fonts.
_NARROW, _WIDE = frozenset("fijlrtI.,:;'|!()[]{} /"), frozenset("mwMW@%")


def make_badge(label: str, value: str, state: State | None = None) -> str:
    """Return an SVG badge with a label and a value; `state` determines the background color.

    For example, use `make_badge("mps", "works (virtual)", "works")`.
    """
    label, value = _clean(label), _clean(value)
    left, right = (_text_width(text) + 2 * _PADDING for text in (label, value))
    title = html.escape(f"{label}: {value}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="{_HEIGHT}" '
        f'viewBox="0 0 {left + right} {_HEIGHT}" role="img" aria-label="{title}">'
        f"<title>{title}</title>"
        f'<path fill="{_LABEL_COLOR}" d="M4 0h{left - 4}v{_HEIGHT}h-{left - 4}a4 4 0 0 1-4-4v-12a4 4 0 0 1 4-4z"/>'
        f'<path fill="{_COLORS[state]}" d="M{left} 0h{right - 4}a4 4 0 0 1 4 4v12a4 4 0 0 1-4 4h-{right - 4}z"/>'
        f'<g fill="#fff" font-family="{_FONT}" font-size="11">{_text(label, 0, left)}{_text(value, left, right)}</g>'
        "</svg>\n"
    )


def _text(text: str, start: int, width: int) -> str:
    """Return an SVG text element, stretched to fit its section of the badge."""
    # `textLength` makes the text fit, because the width is estimated and the fonts of the reader are unknown.
    attributes = f'x="{start + _PADDING}" y="14" textLength="{width - 2 * _PADDING}" lengthAdjust="spacingAndGlyphs"'
    return f"<text {attributes}>{html.escape(text)}</text>"


def _text_width(text: str) -> int:
    """Estimate the width of a string in pixels, in a common sans-serif font at size 11."""
    return max(1, round(sum(_character_width(character) for character in text)))


def _character_width(character: str) -> float:
    # East Asian wide and full-width characters are as wide as the font size.
    if unicodedata.east_asian_width(character) in ("W", "F"):
        return 11.0
    if character in _NARROW:
        return 3.8
    if character in _WIDE:
        return 9.6
    return 7.4 if character.isupper() else 6.4


def _clean(text: str) -> str:
    """Replace characters that XML does not allow with spaces."""
    return "".join(character if character.isprintable() else " " for character in text).strip()
