"""Formatting of plans as text for a terminal."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from anyaccel.planning.decision import Decision

if TYPE_CHECKING:
    from anyaccel.planning.plan import Plan

__all__ = ["describe_decisions", "describe_plan", "split_by_default"]

_DEFAULT_WIDTH, _MIN_WIDTH, _MAX_WIDTH = 100, 60, 120
_NAME_WIDTH = 18

# The defaults on a device without limits, as `str(decision)` prints them; `-` and `no` (nothing, off) are defaults too.
_DEFAULTS = {
    "mode": "eager",
    "dtype": "float32",
    "noise": "cpu",
    "scheduler": "device",
    "compile_policy": "never",
    "check_finite": "yes",
}
# Decisions that describe what is available and change nothing by themselves.
_INFORMATION = {"compiler"}


def describe_plan(plan: Plan, width: int | None = None) -> list[str]:
    """Return the lines that `print(plan)` shows, with decisions that differ from the defaults first.

    `width` defaults to the width of the terminal.
    """
    width = width or shutil.get_terminal_size((_DEFAULT_WIDTH, 24)).columns
    changed, unchanged = split_by_default(plan)
    lines = [f"{plan.pipeline} on {plan.device}: {plan.title}{' (virtual)' if plan.virtual else ''}"]
    if changed:
        lines += ["", "decided for this pipeline and device:", *describe_decisions(changed, width)]
    if unchanged:
        lines += ["", "defaults:", *describe_decisions(unchanged, width, compact=True)]
    if outcomes := list(plan.report.entries()):
        lines += ["", "so far:", *describe_decisions(outcomes, width)]
    return lines


def split_by_default(plan: Plan) -> tuple[list[tuple[str, Decision[Any]]], list[tuple[str, Decision[Any]]]]:
    """Return a plan's decisions as two lists: those that differ from the defaults, and the defaults."""
    changed: list[tuple[str, Decision[Any]]] = []
    unchanged: list[tuple[str, Decision[Any]]] = []
    for name, decision in plan.decisions():
        is_default = (
            # Noise is always drawn on the CPU. It is listed as a decision only if the device cannot draw it.
            not (name == "noise" and "noise" in plan.workarounds.value)
        ) and (
            name in _INFORMATION
            or str(decision) in ("-", "no", _DEFAULTS.get(name))
            # Rules print as text even if they change nothing, and compare equal to a rule without arguments.
            or (name in ("attention", "memory") and decision.value == type(decision.value)())
        )
        (unchanged if is_default else changed).append((name, decision))
    return changed, unchanged


def describe_decisions(
    decisions: Iterable[tuple[str, Decision[Any]]], width: int, *, compact: bool = False
) -> list[str]:
    """Format decisions as lines with name, value and reason, wrapped to `width` columns.

    With `compact`, the reason follows the value in parentheses instead of on a separate line.
    """
    column = max(_MIN_WIDTH, min(width, _MAX_WIDTH)) - 2 - _NAME_WIDTH
    lines: list[str] = []
    for name, decision in decisions:
        value, reason = str(decision), decision.reason
        if compact:
            text = _wrap(reason if value == "-" else f"{value} ({reason})", column)
        else:
            text = _wrap(value, column) + [f"  {line}" for line in _wrap(reason, column - 2)]
        lines += [f"  {name:{_NAME_WIDTH}}{text[0]}", *(f"  {'':{_NAME_WIDTH}}{line}" for line in text[1:])]
    return lines


def _wrap(text: str, width: int) -> list[str]:
    # URLs stay on one line, so they can be clicked and copied.
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
