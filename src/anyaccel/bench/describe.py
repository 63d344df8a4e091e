"""A benchmark in words: a table with a bar for each variant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from anyaccel.backends.size import readable

__all__ = ["describe_bench"]

_ROOM = 30


def describe_bench(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The lines that a terminal shows."""
    for row in rows:
        yield f"{row['title']}{', random weights' if row['random_weights'] else ''}"
        if "error" in row:
            yield f"  {row['error']}"
            continue
        longest = max(variant["median_s"] for variant in row["variants"].values() if "median_s" in variant)
        for name, variant in row["variants"].items():
            if "error" in variant:
                yield f"  {variant['error']}"
                continue
            bar = "█" * max(1, round(_ROOM * variant["median_s"] / longest))
            yield f"  {name:16} {_seconds(variant['median_s']):>9}  {bar:{_ROOM}} {'; '.join(_more(variant))}"
        if row["floor_s"]:
            yield f"  {'floor':16} {_seconds(row['floor_s']):>9}"
        for name in (key for key in row if key.startswith("against ")):
            yield f"  anyaccel is {row[name]:.2f} times as fast as {name.removeprefix('against ')}"
        if "fast against exact" in row:
            psnr = "the same picture" if row["fast_psnr_db"] is None else f"{row['fast_psnr_db']:.1f} dB from it"
            yield f"  speed='fast' is {row['fast against exact']:.2f} times as fast as exact, and {psnr}"


def _more(variant: dict[str, Any]) -> Iterator[str]:
    low, high = variant["spread_s"]
    yield f"{_seconds(low)} to {_seconds(high)}"
    yield f"first picture {_seconds(variant['first_picture_s'])}"
    if variant.get("peak_bytes"):
        yield f"peak {readable(variant['peak_bytes'])}"
    if "psnr_db" in variant:
        yield "the same picture" if variant["psnr_db"] is None else f"{variant['psnr_db']:.1f} dB"


def _seconds(value: float) -> str:
    return f"{value:.3f} s" if value < 10 else f"{value:.1f} s"
