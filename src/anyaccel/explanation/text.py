"""Text output of `anyaccel explain`, with a bar chart of the memory use in each phase."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from anyaccel.planning.loading_memory import LoadingForecast
from anyaccel.planning.memory import Forecast, find_fastest_option
from anyaccel.planning.plan import Plan
from anyaccel.planning.plan_text import describe_decisions, split_by_default
from anyaccel.planning.time_estimate import LARGEST_RATIO, SMALLEST_RATIO, TimeEstimate
from anyaccel.units import readable

__all__ = ["describe_explanation"]

# Block characters of 0 to 7 eighths of a column.
_EIGHTHS = " ▏▎▍▌▋▊▉"
_MIN_WIDTH, _MAX_WIDTH = 60, 120
# Longer times are shown in minutes.
_MINUTES_FROM_S = 180


def describe_explanation(plan: Plan, model: str, width: int = 100, *, download_bytes: int | None = None) -> list[str]:
    """Return the explanation of a plan as lines of text for a terminal with the given width.

    `download_bytes` is the total size of the files that are not on this machine yet, if known.
    """
    forecast = plan.forecast
    assert forecast is not None
    # Bars need a minimum width, and long lines of prose are hard to read.
    width = max(_MIN_WIDTH, min(width, _MAX_WIDTH))
    lines = _wrap(f"{model} on {plan.device}: {plan.title}{' (virtual)' if plan.virtual else ''}", width, "")
    lines += [f"{_describe_output(forecast)} in {plan.dtype.value}, {plan.pipeline}", ""]
    lines += _wrap(_describe_verdict(plan, forecast), width, "")
    lines += ["", *_draw_phases(forecast, width), ""]
    weights = sorted(forecast.components, key=lambda component: -component[1])
    total = readable(sum(size for _, size in weights))
    without = f" without {' and '.join(forecast.not_included)}" if forecast.not_included else ""
    lines += _wrap(
        f"weights {total}{without}: " + ", ".join(f"{name} {readable(size)}" for name, size in weights), width, ""
    )
    if forecast.loading:
        lines.append(_describe_loading(forecast.loading))
    if download_bytes:
        lines.append(f"to download: {readable(download_bytes)} (minus files already in the local cache)")
    if plan.capture.value and forecast.fits and forecast.recorded_peak_bytes > forecast.peak_bytes:
        peak = readable(forecast.recorded_peak_bytes)
        fits = forecast.recorded_peak_bytes <= forecast.capacity_bytes
        lines.append(f"peak with captured graphs: {peak}" + ("" if fits else ", does not fit, so no graph is captured"))
    if forecast.time:
        lines += _wrap(_describe_time(forecast.time, forecast), width, "")
    lines += [*_describe_largest(plan, forecast), *_describe_quantization(plan, forecast)]
    changed, unchanged = split_by_default(plan)
    if not forecast.fits:
        lines += _section("to make it fit, one of", _list_changes(plan, forecast), width)
    lines += ["", "plan", *describe_decisions(changed, width)]
    lines += _wrap("defaults: " + ", ".join(name for name, _ in unchanged), width, "  ")
    lines += _draw_options(forecast, width)
    lines += _draw_commands(plan, forecast, model, width)
    for title, entries in _list_sections(forecast):
        lines += _section(title, entries, width)
    return lines


def _describe_output(forecast: Forecast) -> str:
    noun = {"image": "image", "video": "video", "audio": "audio clip"}[forecast.kind]
    details = [f"{forecast.size[0]} × {forecast.size[1]}"] if forecast.size else []
    details += [f"{forecast.frames} frame{'s' if forecast.frames != 1 else ''}"] if forecast.frames else []
    rate = f" at {forecast.fps:g} frames per second" if forecast.fps else ""
    details += [f"{forecast.seconds:.3g} s{rate}"] if forecast.seconds else []
    count = f"{forecast.images} {noun}{'s' if forecast.images != 1 else ''}"
    return f"{count} of {', '.join(details)}" if details else count


def _describe_verdict(plan: Plan, forecast: Forecast) -> str:
    need, capacity = readable(forecast.peak_bytes), readable(forecast.capacity_bytes)
    if forecast.fits:
        without = f", without {' and '.join(forecast.not_included)}" if forecast.not_included else ""
        return f"fits ({plan.memory}): peak {need} of {capacity}{without}"
    return f"does not fit: {plan.memory.reason}"


def _draw_phases(forecast: Forecast, width: int) -> Iterator[str]:
    """Yield the lines of a bar chart with one bar per phase and a mark at the device's memory capacity."""
    bar_width = width - 27  # the rest is the phase name, the size and "peak"
    scale = max(forecast.capacity_bytes, forecast.peak_bytes, 1)
    edge = round(forecast.capacity_bytes / scale * bar_width)
    for name, size in forecast.phases:
        bar = _draw_bar(size / scale, bar_width)
        mark = "  peak" if size == forecast.peak_bytes else ""
        yield f"  {name:8}{bar[:edge]}│{bar[edge:]} {readable(size):>9}{mark}"
    capacity = f"{readable(forecast.capacity_bytes)} available"
    if 10 + edge + 2 + len(capacity) <= width:
        yield f"{'':{10 + edge}}└ {capacity}"
    else:
        yield f"{capacity:>{10 + edge - 1}} ┘"


def _draw_bar(share: float, width: int) -> str:
    full, eighth = divmod(round(share * width * 8), 8)
    return ("█" * full + (_EIGHTHS[eighth] if eighth else "")).ljust(width)[:width]


def _describe_loading(loading: LoadingForecast) -> str:
    total, allocated = readable(loading.peak_bytes), readable(loading.allocated_bytes)
    where = f" ({loading.component})" if loading.component else ""
    if loading.allocated_bytes == 0:
        return f"host memory for loading: {total}{where}, mapped from the files"
    return f"host memory for loading: {total}{where}, {allocated} of it allocated"


def _describe_time(time: TimeEstimate, forecast: Forecast) -> str:
    result = {"image": "image", "video": "video", "audio": "audio clip"}[forecast.kind]
    calls = f"{forecast.images} {result}s" if forecast.images != 1 else f"one {result}"
    moved = f", plus the time to move {readable(time.moved_bytes)} of weights to the device" if time.moved_bytes else ""
    published = f"{time.product_flops / 1e12:.0f} TFLOPS and {time.product_bytes_per_s / 1e9:.0f} GB/s"
    return (
        f"estimated time for {calls}: {_describe_seconds(time.seconds)} with {time.steps} steps, without compilation"
        f"{moved}, from {_describe_count(time.flops / 1e12)} TFLOP and the published {published}; on an H200, measured "
        f"times are {SMALLEST_RATIO:.2g} to {LARGEST_RATIO:.2g} times as long as estimated"
    )


def _describe_count(count: float) -> str:
    return f"{count:,.0f}" if count >= 1000 else f"{count:.3g}"


def _describe_seconds(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < _MINUTES_FROM_S else f"{seconds / 60:.2g} min"


def _describe_largest(plan: Plan, forecast: Forecast) -> Iterator[str]:
    if forecast.largest_batch is not None and forecast.fits:
        batch, images_per_call = forecast.largest_batch, plan.images_per_call.value
        if images_per_call is None:
            yield f"largest batch at this size: {batch}"
        else:
            yield f"largest batch at this size by memory: {batch}; the plan runs {images_per_call} at a time"
    if forecast.largest_size is not None:
        width, height = forecast.largest_size
        is_last = forecast.largest_tried_side is not None and max(width, height) >= forecast.largest_tried_side
        more = " (no larger size was tried)" if is_last else ""
        yield f"largest single {forecast.kind}{'' if forecast.fits else ' that would fit'}: {width} × {height}{more}"


def _describe_quantization(plan: Plan, forecast: Forecast) -> Iterator[str]:
    if forecast.fits and not plan.weights.value and plan.memory.value.residence == "resident":
        yield "quantized weights (--weights) are not needed: all weights stay on the device"


def _list_sections(forecast: Forecast) -> Iterator[tuple[str, list[str]]]:
    limits = [f"{limit.name} ({limit.effect}), hit by {limit.what}: {limit.says}" for limit in forecast.limits]
    yield "device limits that this model hits at this size", limits
    yield "notes", list(forecast.notes)


def _draw_options(forecast: Forecast, width: int) -> Iterator[str]:
    """Yield a table of the memory with each format of quantized weights."""
    if not forecast.offers:
        return
    result = _name_result(forecast)
    title = f"quantized weights need less memory, but change the {result}; to use them, add --weights FORMAT"
    yield from ("", *_wrap(title, width, ""))
    yield f"  {'':11}{'weights':>9}{'peak':>11}"
    for option in forecast.offers:
        yield f"  {option.name:11}{readable(option.weights_bytes):>9}{readable(option.peak_bytes):>11}  {option.memory}"


def _list_changes(plan: Plan, forecast: Forecast) -> list[str]:
    changes = [f"a device with {readable(forecast.peak_bytes)} for tensors"]
    if forecast.largest_size is not None:
        article = "an" if forecast.kind == "image" else "a"
        changes.append(f"{article} {forecast.kind} of {forecast.largest_size[0]} × {forecast.largest_size[1]}")
    quantized = next((option.name for option in forecast.offers if option.fits), None)
    changes += [f"--weights {quantized}, which changes the {_name_result(forecast)}"] if quantized else []
    if plan.dtype.value in ("float32", "float64"):
        changes.append("--dtype bfloat16, which halves the memory")
    return changes


def _draw_commands(plan: Plan, forecast: Forecast, model: str, width: int) -> Iterator[str]:
    """Yield the command for this call, and the one with quantized weights if they allow a faster memory mode."""
    if not forecast.prompt_only:
        return
    size = f" --size {forecast.size[0]}x{forecast.size[1]}" if forecast.size else ""
    frames = f" --frames {forecast.frames}" if forecast.frames else ""
    command = f'anyaccel generate "PROMPT" --model {model}{size}{frames}'
    if plan.weights.value:
        command += f" --weights {plan.weights.value}"
    name = find_fastest_option(forecast.offers, plan.memory.value.residence if forecast.fits else None)
    commands = [(command, "")] if forecast.fits else []
    commands += [
        (f"{command} --weights {name}", f"  # {offer.memory}; changes the {_name_result(forecast)}")
        for offer in forecast.offers
        if offer.name == name
    ]
    if commands:
        yield from ("", "to run it on this device")
    for text, comment in commands:
        if comment:
            yield comment
        yield from _join_shell_lines(_wrap(text, width - 2, "  "))


def _join_shell_lines(lines: list[str]) -> list[str]:
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def _name_result(forecast: Forecast) -> str:
    return {"image": "image", "video": "video", "audio": "audio"}[forecast.kind]


def _section(title: str, entries: list[str], width: int) -> list[str]:
    if not entries:
        return []
    return ["", *_wrap(title, width, ""), *(line for entry in entries for line in _wrap(entry, width, "  "))]


def _wrap(text: str, width: int, indent: str) -> list[str]:
    # A URL stays on one line, so that it can be clicked and copied.
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    ) or [indent]
