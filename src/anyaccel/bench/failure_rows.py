"""Results for benchmark variants that failed: the cause in one line, a hint and the log."""

from __future__ import annotations

import signal
import traceback
from typing import Any

from anyaccel.bench.case import STOCK
from anyaccel.errors import AnyaccelError, summarize_error

__all__ = ["make_exit_row", "make_failure_row", "make_timeout_row"]

_MAX_LINES = 60
# Part of the error text of TorchInductor if there is no C++ compiler.
_COMPILER = "C++ compiler"


def make_failure_row(variant: str, error: Exception) -> dict[str, Any]:
    """Return the result for a benchmark variant that raised an error, with a hint and the traceback."""
    if isinstance(error, AnyaccelError):
        cause, hint = error.message, error.hint
    else:
        from anyaccel.upstream.torch_compile_internals import is_compiler_error

        cause = summarize_error(error)
        hint = _find_hint(variant, cause, compiling=is_compiler_error(error))
    details = "".join(traceback.format_exception(error)).splitlines()
    return {"error": f"{variant} failed: {cause}", "hint": hint, "details": details[-_MAX_LINES:]}


def make_exit_row(variant: str, status: int | None, log: str) -> dict[str, Any]:
    """Return the result for a benchmark variant after its process exited without a response."""
    lines = _read_lines(log)
    if status is not None and status < 0:
        cause, hint = (
            f"its process was killed by {_name_signal(-status)}",
            "check the free memory, and use --json to see the log",
        )
    else:
        cause = lines[-1].strip() if lines else f"its process exited with status {status} and without output"
        hint = "use --json to see the log"
    return {"error": f"{variant} failed: {cause}", "hint": hint, "details": lines[-_MAX_LINES:]}


def make_timeout_row(variant: str, timeout_s: float, log: str) -> dict[str, Any]:
    """Return the result for a benchmark variant that was killed because it took too long."""
    error = f"{variant} failed: it was not done after {timeout_s:g} s"
    return {"error": error, "hint": "raise the time limit", "details": _read_lines(log)[-_MAX_LINES:]}


def _read_lines(log: str) -> list[str]:
    return [line for line in log.splitlines() if line.strip()]


def _find_hint(variant: str, cause: str, *, compiling: bool) -> str:
    # Only the compiled variant can be left out.
    without = ", or use --against eager to skip this variant" if variant == STOCK[1] else ""
    if _COMPILER in cause:
        return f"install a {_COMPILER}, or set CXX to the path of one{without}"
    if compiling and without:
        return "torch.compile fails on this machine: use --against eager to skip it, or --json to see the traceback"
    return "use --json to see the traceback"


def _name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
