"""Colored console output."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.markup import escape

__all__ = ["color_verdict", "make_console"]


def make_console() -> Console:
    """Return a console that does not wrap lines, so that long links can be copied."""
    # Without a terminal, rich assumes 80 columns, even with soft_wrap.
    return Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else 10_000)


def color_verdict(verdict: str) -> str:
    """Return a verdict with rich markup for its severity, such as `[red]error in bmm[/red]`."""
    first = verdict.split(maxsplit=1)[0].rstrip(",") if verdict else ""
    colors = {"yes": "green", "error": "red", "wrong": "red", "narrowed": "yellow", "slow": "yellow", "not": "dim"}
    color = colors.get(first)
    return f"[{color}]{escape(verdict)}[/{color}]" if color else escape(verdict)
