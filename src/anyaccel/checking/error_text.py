"""One-line description of an error in user code, with the line that raised it."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

from anyaccel.checking.path_text import shorten
from anyaccel.errors import summarize_error

__all__ = ["describe_failure"]

_PACKAGE = Path(__file__).parents[1]
_MAX_CHARACTERS = 400


def describe_failure(failure: BaseException) -> str:
    """Return the error with the innermost line of user code: `KeyError: 'a' (mine.py:3)`."""
    summary = summarize_error(failure)[:_MAX_CHARACTERS]
    frames = [frame for frame in traceback.extract_tb(failure.__traceback__) if not _is_library(frame.filename)]
    return f"{summary} ({shorten(frames[-1].filename)}:{frames[-1].lineno})" if frames else summary


def _is_library(file: str) -> bool:
    # "<" is the start of `<frozen …>` and `<string>`, which have no file.
    prefixes = (sysconfig.get_paths()["purelib"], sysconfig.get_paths()["stdlib"], str(_PACKAGE), "<")
    return file.startswith(prefixes)
