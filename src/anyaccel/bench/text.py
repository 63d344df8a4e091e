"""Text output for benchmark results: a table with one bar per variant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from anyaccel.units import readable

__all__ = ["format_bench"]

# Columns of the bar of the slowest variant.
_BAR_WIDTH = 30


def format_bench(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Format benchmark results as a table and yield its lines."""
    for row in rows:
        yield f"{row['title']}{', random weights' if row['random_weights'] else ''}"
        # A row with an error has no measured variants, only failed ones.
        variants = row["failed"] if "error" in row else row["variants"]
        slowest = max((variant["median_s"] for variant in variants.values() if "median_s" in variant), default=0.0)
        for name, variant in variants.items():
            if "error" in variant:
                yield f"  {variant['error']}"
                yield f"    hint: {variant['hint']}"
                continue
            bar = "█" * max(1, round(_BAR_WIDTH * variant["median_s"] / slowest))
            details = "; ".join(_format_details(variant))
            yield f"  {name:16} {_format_seconds(variant['median_s']):>9}  {bar:{_BAR_WIDTH}} {details}"
        if row["floor_s"]:
            yield f"  {'floor':16} {_format_seconds(row['floor_s']):>9}"
        for name in (key for key in row if key.startswith("against ")):
            yield f"  anyaccel is {row[name]:.2f} times as fast as {name.removeprefix('against ')}"
        if "fast against exact" in row:
            difference = next(_format_difference(row, "fast_", " from it"))
            yield f"  speed='fast' is {row['fast against exact']:.2f} times as fast as exact, and {difference}"


def _format_details(variant: dict[str, Any]) -> Iterator[str]:
    low, high = variant["spread_s"]
    yield f"{_format_seconds(low)} to {_format_seconds(high)}"
    yield f"first {variant.get('kind', 'image')} {_format_seconds(variant['first_picture_s'])}"
    if variant.get("peak_bytes"):
        yield f"peak {readable(variant['peak_bytes'])}"
    yield from _format_difference(variant)


def _format_difference(row: dict[str, Any], prefix: str = "", ending: str = "") -> Iterator[str]:
    """Yield the difference from the reference image as text, such as `41.2 dB`.

    Yield nothing for the reference itself.
    """
    if f"{prefix}not_compared" in row:
        yield f"{row[f'{prefix}not_compared']}"
    elif f"{prefix}psnr_db" in row:
        psnr = row[f"{prefix}psnr_db"]
        yield f"same {row.get('kind', 'image')}" if psnr is None else f"{psnr:.1f} dB{ending}"


def _format_seconds(value: float) -> str:
    return f"{value:.3f} s" if value < 10 else f"{value:.1f} s"
