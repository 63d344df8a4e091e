"""A benchmark in words: a table with a bar for each variant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from anyaccel.units import readable

__all__ = ["format_bench"]

_ROOM = 30


def format_bench(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The lines that a terminal shows."""
    for row in rows:
        yield f"{row['title']}{', random weights' if row['random_weights'] else ''}"
        variants = row["failed"] if "error" in row else row["variants"]
        longest = max((variant["median_s"] for variant in variants.values() if "median_s" in variant), default=0.0)
        for name, variant in variants.items():
            if "error" in variant:
                yield f"  {variant['error']}"
                yield f"    hint: {variant['hint']}"
                continue
            bar = "█" * max(1, round(_ROOM * variant["median_s"] / longest))
            yield f"  {name:16} {_seconds(variant['median_s']):>9}  {bar:{_ROOM}} {'; '.join(_more(variant))}"
        if row["floor_s"]:
            yield f"  {'floor':16} {_seconds(row['floor_s']):>9}"
        for name in (key for key in row if key.startswith("against ")):
            yield f"  anyaccel is {row[name]:.2f} times as fast as {name.removeprefix('against ')}"
        if "fast against exact" in row:
            like = next(_say_likeness(row, "fast_", " from it"))
            yield f"  speed='fast' is {row['fast against exact']:.2f} times as fast as exact, and {like}"


def _more(variant: dict[str, Any]) -> Iterator[str]:
    low, high = variant["spread_s"]
    yield f"{_seconds(low)} to {_seconds(high)}"
    yield f"first picture {_seconds(variant['first_picture_s'])}"
    if variant.get("peak_bytes"):
        yield f"peak {readable(variant['peak_bytes'])}"
    yield from _say_likeness(variant)


def _say_likeness(found: dict[str, Any], prefix: str = "", ending: str = "") -> Iterator[str]:
    """How like a picture is; nothing where it is the one that others are compared with."""
    if f"{prefix}not_compared" in found:
        yield f"{found[f'{prefix}not_compared']}"
    elif f"{prefix}psnr_db" in found:
        psnr = found[f"{prefix}psnr_db"]
        yield "the same picture" if psnr is None else f"{psnr:.1f} dB{ending}"


def _seconds(value: float) -> str:
    return f"{value:.3f} s" if value < 10 else f"{value:.1f} s"
