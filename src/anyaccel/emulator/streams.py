"""Streams and events for a synchronous device, where each call returns after its work is complete."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

__all__ = ["Event", "Stream", "make_stream_classes"]


class Stream:
    """A stream on a synchronous device."""

    event: type[Event]

    # Vendors' constructors take further arguments (priority, stream_id), which have no effect here.
    def __init__(self, device: Any = None, *args: Any, **kwargs: Any) -> None:
        self.device = device

    def synchronize(self) -> None:
        """Wait until all work on the device is complete."""
        self.event.wait_for_device()

    def wait_stream(self, other: Any) -> None:
        """Return immediately, because the other stream's work is already complete."""

    def wait_event(self, event: Any) -> None:
        """Return immediately, because the event is already complete."""

    def record_event(self, event: Any = None) -> Any:
        """Record the event, or a new one if none is given, and return it."""
        event = event or self.event()
        event.record(self)
        return event

    def query(self) -> bool:
        """Return True, because all work in the stream is already complete."""
        return True

    def is_capturing(self) -> bool:
        """Return False, because the device has no graphs."""
        return False

    # `torch.NAME.stream(stream)` returns the stream itself, so a stream must be a context manager.
    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None: ...


class Event:
    """An event that stores a CPU timestamp, taken when all work on the device is complete."""

    wait_for_device: Callable[[], None]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.time_s = 0.0

    def record(self, stream: Any = None) -> None:
        """Wait until all work on the device is complete, then record the time."""
        # Without the wait, `elapsed_time` would measure only how long it takes to enqueue the work.
        type(self).wait_for_device()
        self.time_s = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Return immediately, because the event is already complete."""

    def synchronize(self) -> None:
        """Return immediately, because the event is already complete."""

    def query(self) -> bool:
        """Return True, because the event is already complete."""
        return True

    def elapsed_time(self, other: Event) -> float:
        """Return the time in milliseconds from this event to another."""
        return (other.time_s - self.time_s) * 1000.0  # milliseconds, like torch's events


def make_stream_classes(wait_for_device: Callable[[], None]) -> tuple[type[Stream], type[Event]]:
    """Return `Stream` and `Event` classes that call `wait_for_device` to synchronize."""
    # torch.NAME.Event() has no device argument, so the class itself must know how to wait.
    event = type("Event", (Event,), {"wait_for_device": staticmethod(wait_for_device)})
    return type("Stream", (Stream,), {"event": event}), event
