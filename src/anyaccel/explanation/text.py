"""An explanation in words, with the memory of each phase as bars."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from anyaccel.planning.memory import Forecast
from anyaccel.planning.plan import Plan
from anyaccel.units import readable

__all__ = ["describe_explanation"]

_EIGHTHS = " ▏▎▍▌▋▊▉"
_NARROWEST, _WIDEST = 60, 120


def describe_explanation(plan: Plan, model: str, width: int = 100, *, download_bytes: int | None = None) -> list[str]:
    """The lines that a terminal of some width shows; what there is to download, where it is known."""
    forecast = plan.forecast
    assert forecast is not None
    width = max(_NARROWEST, min(width, _WIDEST))
    lines = [f"{model} on {plan.device}: {plan.title}{' (virtual)' if plan.virtual else ''}"]
    lines += [f"{_count(forecast)} in {plan.dtype.value}, {plan.pipeline}", ""]
    lines += _wrap(_verdict(plan, forecast), width, "")
    lines += ["", *_draw(forecast, width), ""]
    weights = sorted(forecast.components, key=lambda one: -one[1])
    total = readable(sum(size for _, size in weights))
    lines += _wrap(f"weights {total}: " + ", ".join(f"{name} {readable(size)}" for name, size in weights), width, "")
    if download_bytes:
        lines.append(f"to download, unless it is here already: {readable(download_bytes)}")
    if plan.capture.value and forecast.fits and forecast.recorded_peak_bytes > forecast.peak_bytes:
        once = readable(forecast.recorded_peak_bytes)
        there = forecast.recorded_peak_bytes <= forecast.capacity_bytes
        lines.append(f"once it was recorded: {once}" + ("" if there else ", so that it is not recorded"))
    lines += list(_largest(plan, forecast))
    for title, entries in _sections(plan, forecast):
        if entries:
            lines += ["", title]
            for entry in entries:
                lines += _wrap(entry, width, "  ")
    return lines


def _count(forecast: Forecast) -> str:
    images = f"{forecast.images} image{'s' if forecast.images != 1 else ''}"
    return f"{images} of {forecast.size[0]} × {forecast.size[1]}" if forecast.size else images


def _verdict(plan: Plan, forecast: Forecast) -> str:
    need, capacity = readable(forecast.peak_bytes), readable(forecast.capacity_bytes)
    if forecast.fits:
        return f"fits, with {plan.memory}: {need} of {capacity}"
    return f"does not fit: {plan.memory.reason}"


def _draw(forecast: Forecast, width: int) -> Iterator[str]:
    """A bar for each phase, and where the device ends."""
    room = width - 25
    scale = max(forecast.capacity_bytes, forecast.peak_bytes, 1)
    edge = round(forecast.capacity_bytes / scale * room)
    for name, size in forecast.phases:
        bar = _bar(size / scale, room)
        mark = "  peak" if size == forecast.peak_bytes else ""
        yield f"  {name:8}{bar[:edge]}│{bar[edge:]} {readable(size):>9}{mark}"
    yield f"  {'':8}{' ' * edge}└ {readable(forecast.capacity_bytes)} there"


def _bar(share: float, room: int) -> str:
    eighths = round(share * room * 8)
    whole, rest = divmod(eighths, 8)
    return ("█" * whole + (_EIGHTHS[rest] if rest else "")).ljust(room)[:room]


def _largest(plan: Plan, forecast: Forecast) -> Iterator[str]:
    if forecast.largest_batch is not None and forecast.fits:
        most, at_once = forecast.largest_batch, plan.images_per_call.value
        if at_once is None:
            yield f"largest batch of this size in one call: {most}"
        else:
            images = f"{most} image{'s' if most != 1 else ''}"
            yield f"memory would do for {images} of this size in one call; {at_once} at a time is the plan"
    if forecast.largest_size is not None:
        width, height = forecast.largest_size
        more = " (the largest that is tried)" if max(width, height) >= 4096 else ""
        yield f"largest single image{'' if forecast.fits else ' that would fit'}: {width} × {height}{more}"


def _sections(plan: Plan, forecast: Forecast) -> Iterator[tuple[str, list[str]]]:
    if not forecast.fits:
        yield "to fit, one of", _list_changes(plan, forecast)
    decisions = [
        f"{name}: {decision}. {decision.reason}" for name, decision in plan.decisions() if str(decision) != "-"
    ]
    yield "plan", decisions
    limits = [f"{limit.name} ({limit.effect}), met by {limit.what}: {limit.says}" for limit in forecast.limits]
    yield "limits of the device that this model meets at this size", limits
    offers = [
        f"{offer.name} weights for {offer.component}: {readable(offer.saves_bytes)} less. {offer.says}"
        for offer in forecast.offers
    ]
    yield "would save memory and changes the picture; load the model so if you want it", offers
    yield "notes", list(forecast.notes)


def _list_changes(plan: Plan, forecast: Forecast) -> list[str]:
    changes = [f"a device with {readable(forecast.peak_bytes)} for tensors"]
    if forecast.largest_size is not None:
        changes.append(f"a picture of {forecast.largest_size[0]} × {forecast.largest_size[1]}")
    if plan.dtype.value in ("float32", "float64"):
        changes.append("--dtype bfloat16, which halves all of it")
    return changes


def _wrap(text: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent + "  ") or [indent]
