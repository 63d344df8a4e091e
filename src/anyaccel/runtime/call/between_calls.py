"""Placement of a pipeline between its calls: `to` waits for other threads and is rejected in callbacks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from anyaccel.backends.device_functions import dtype_name
from anyaccel.errors import UsageError
from anyaccel.runtime.call.turn import waiting_for_turn
from anyaccel.runtime.placement.place import resolve_device
from anyaccel.runtime.placement_state import find_placement

__all__ = ["between_calls", "make_running_error"]


@contextmanager
def between_calls(pipe: Any, device: Any, options: dict[str, Any]) -> Iterator[bool]:
    """Wait until no other thread calls the pipeline; yield whether the pipeline can be placed.

    In a callback of a running call, yield False if the arguments of `to` change nothing, and raise
    `UsageError` otherwise.
    """
    placement = find_placement(pipe)
    with waiting_for_turn(pipe, placement) if placement is not None else nullcontext():
        if placement is None or not placement.running:
            yield True
            return
        opened = placement.opened if device is None else resolve_device(device, placement.options)
        dtype = dtype_name(options.get("dtype") or placement.plan.dtype.value)
        same = (opened.sheet.name, opened.index, dtype) == (
            placement.opened.sheet.name, placement.opened.index, placement.plan.dtype.value
        )  # fmt: skip
        if not same or options.keys() - {"dtype"}:
            raise make_running_error(pipe, "the pipeline cannot be placed")
        yield False


def make_running_error(pipe: Any, problem: str) -> UsageError:
    """Return the error for a method that a callback must not call."""
    return UsageError(
        f"{problem} while {type(pipe).__name__} is running",
        hint="call it before or after the pipeline call, not in a callback",
    )
