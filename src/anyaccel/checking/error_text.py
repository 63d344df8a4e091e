"""An error of the user's own code, in one line with the line of code."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

from anyaccel.checking.paths import shorten
from anyaccel.errors import summarize_error

__all__ = ["describe_failure"]

_PACKAGE = Path(__file__).parents[1]


def describe_failure(failure: BaseException) -> str:
    """What went wrong, and the innermost line that is neither a library's nor ours: `KeyError: 'a' (mine.py:3)`."""
    words = summarize_error(failure)[:400]
    own = [one for one in traceback.extract_tb(failure.__traceback__) if not _is_library(one.filename)]
    return f"{words} ({shorten(own[-1].filename)}:{own[-1].lineno})" if own else words


def _is_library(file: str) -> bool:
    inside = (sysconfig.get_paths()["purelib"], sysconfig.get_paths()["stdlib"], str(_PACKAGE), "<")
    return file.startswith(inside)
