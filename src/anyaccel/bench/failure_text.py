"""Why a variant could not be measured: its cause in one line, what helps, and all that it said."""

from __future__ import annotations

import signal
import traceback
from typing import Any

from anyaccel.bench.case import STOCK
from anyaccel.errors import AnyaccelError, summarize_error

__all__ = ["describe_death", "describe_failure"]

_MOST_LINES = 60
_COMPILER = "C++ compiler"


def describe_failure(variant: str, error: Exception) -> dict[str, Any]:
    """An error that a variant raised."""
    if isinstance(error, AnyaccelError):
        cause, hint = error.message, error.hint
    else:
        from anyaccel.upstream.torch_internals import is_compiler_error

        cause = summarize_error(error)
        hint = _find_hint(variant, cause, compiling=is_compiler_error(error))
    details = "".join(traceback.format_exception(error)).splitlines()
    return {"error": f"{variant} failed: {cause}", "hint": hint, "details": details[-_MOST_LINES:]}


def describe_death(variant: str, status: int | None, log: str) -> dict[str, Any]:
    """The end of a variant's process before it had answered."""
    words = [line for line in log.splitlines() if line.strip()]
    if status is not None and status < 0:
        cause, hint = f"its process was ended by {_name_signal(-status)}", "is there memory enough? --json has its log"
    else:
        cause, hint = words[-1].strip() if words else "it said nothing", "--json has its log"
    return {"error": f"{variant} failed: {cause}", "hint": hint, "details": words[-_MOST_LINES:]}


def _find_hint(variant: str, cause: str, *, compiling: bool) -> str:
    without = ", or leave it out by --against eager" if variant == STOCK[1] else ""
    if _COMPILER in cause:
        return f"install a {_COMPILER}, or name one in CXX{without}"
    if compiling and without:
        return "torch.compile fails here: leave it out by --against eager; --json has the traceback"
    return "--json has the traceback"


def _name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
