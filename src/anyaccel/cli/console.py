"""The console that tables are printed on."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.markup import escape

__all__ = ["colour_verdict", "make_console"]


def make_console() -> Console:
    """Lines are left whole: a terminal wraps them itself, and an address can be copied."""
    return Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else 10_000)


def colour_verdict(verdict: str) -> str:
    """A verdict in the colour of how well it bodes: `[red]error in bmm[/red]`."""
    first = verdict.split(maxsplit=1)[0].rstrip(",") if verdict else ""
    colours = {"yes": "green", "error": "red", "wrong": "red", "narrowed": "yellow", "slow": "yellow", "not": "dim"}
    colour = colours.get(first)
    return f"[{colour}]{escape(verdict)}[/{colour}]" if colour else escape(verdict)
