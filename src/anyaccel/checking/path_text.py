"""File path formatting for reports."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["shorten"]


def shorten(file: str) -> str:
    """Return a path relative to the working directory if the file is inside it: `src/pipeline.py`."""
    path = Path(file)
    here = Path(os.getcwd())
    return path.relative_to(here).as_posix() if path.is_absolute() and path.is_relative_to(here) else file
