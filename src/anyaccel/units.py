"""Parsing and formatting of memory sizes."""

from __future__ import annotations

from anyaccel.errors import UsageError

__all__ = ["parse_size", "readable"]

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(text: str) -> int:
    """Parse a memory size such as `16GiB`, `512MB` or `1000` into bytes."""
    trimmed = text.strip().upper()
    digits = trimmed.rstrip("KMGIB")
    unit = trimmed[len(digits) :] or "B"
    try:
        amount = float(digits)
    except ValueError:
        amount = -1.0
    # The upper bound also rejects inf and sizes that overflow later computations.
    if unit not in _UNITS or not 0 < amount * _UNITS[unit] < 2**60:
        raise UsageError(f"{text!r} is not a valid memory size", hint="use a size such as 16GiB, 96GB or 512MiB")
    return int(amount * _UNITS[unit])


def readable(size: int) -> str:
    """Format a number of bytes as text, such as `1.5 GiB` or `312 MiB`."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}" if size < 100 * factor else f"{size / factor:.0f} {unit}"
    return f"{size} bytes"
