"""Job events, passed from the dispatcher's thread to the HTTP requests that are waiting for them."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["EventBus", "JobEvent", "Progress", "Subscription"]

# Part of the progress of a video that is its encoding.
_SAVING_SHARE = 0.05
# Queued events per subscriber. If a slow client falls further behind, its oldest steps and previews are dropped.
_MAX_QUEUED = 64


@dataclass(frozen=True)
class JobEvent:
    """Change in a job's state or progress.

    A `preview` event contains a preview image, and a `made` event contains a finished image. A `save` event has the
    number of encoded frames of a video.
    """

    kind: Literal["step", "preview", "made", "save", "state"]
    index: int = 0
    """Position of the image in its job."""
    done: int = 0
    total: int = 0
    number: int = 0
    """Position of a preview among those of its image."""
    content: bytes = b""


@dataclass
class Progress:
    """Progress of a running job: completed steps, previews and finished images."""

    steps: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Done and total steps by image index."""
    saves: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Done and total frames of videos that are encoded."""
    images: list[JobEvent] = field(default_factory=list)
    """Events with previews and finished images."""

    def to_events(self) -> list[JobEvent]:
        """Return the events that inform a new subscriber of the job's progress so far."""
        steps = [JobEvent("step", index, done, total) for index, (done, total) in self.steps.items()]
        saves = [JobEvent("save", index, done, total) for index, (done, total) in self.saves.items()]
        return [*steps, *self.images, *saves]

    def fraction(self, images: int, *, with_saving: bool) -> float:
        """Return the fraction of a job's steps that are done, from 0 to 1, for a job with `images` images.

        With `with_saving=True`, the encoding of the results is the last part of the job.
        """
        steps, saves = (
            sum(done / total for done, total in counts.values() if total) / max(1, images)
            for counts in (self.steps, self.saves)
        )
        return (1 - _SAVING_SHARE) * steps + _SAVING_SHARE * saves if with_saving else steps


class Subscription:
    """Queue of a job's events for one HTTP request.

    A subscription must be created in the event loop that reads it.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.queued: deque[JobEvent] = deque()
        self.available = asyncio.Event()

    async def next(self, timeout_s: float) -> JobEvent | None:
        """Wait for the next event; return None if none arrives within `timeout_s` seconds."""
        if not self.queued:
            self.available.clear()
            try:
                await asyncio.wait_for(self.available.wait(), timeout_s)
            except TimeoutError:
                return None
        return self.queued.popleft() if self.queued else None

    def drain(self) -> list[JobEvent]:
        """Remove and return all queued events."""
        events = list(self.queued)
        self.queued.clear()
        return events

    def put(self, event: JobEvent) -> None:
        """Add an event to the queue. Not thread-safe: call it only from the event loop's thread."""
        if len(self.queued) >= _MAX_QUEUED:
            # Never drop `state` events: a reader that misses the last one would wait forever.
            droppable = next((queued for queued in self.queued if queued.kind in ("step", "save", "preview")), None)
            if droppable is not None:
                self.queued.remove(droppable)
        self.queued.append(event)
        self.available.set()


class EventBus:
    """Event bus that delivers job events to subscribers and stores the progress of running jobs."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.subscriptions: dict[str, list[Subscription]] = {}
        self.progress: dict[str, Progress] = {}

    @contextmanager
    def subscribe(self, job: str) -> Iterator[Subscription]:
        """Subscribe to a job's events inside the `with` block, starting with the job's current progress."""
        subscription = Subscription()
        # One critical section: an event published between the two steps would be lost or delivered twice.
        with self.lock:
            self.subscriptions.setdefault(job, []).append(subscription)
            progress = self.progress.get(job)
            for event in [] if progress is None else progress.to_events():
                subscription.put(event)
        try:
            yield subscription
        finally:
            with self.lock:
                remaining = self.subscriptions[job]
                remaining.remove(subscription)
                if not remaining:
                    del self.subscriptions[job]

    def publish(self, job: str, event: JobEvent) -> None:
        """Record an event in the job's progress and send it to all subscribers of the job; thread-safe."""
        with self.lock:
            if event.kind != "state":
                progress = self.progress.setdefault(job, Progress())
                if event.kind == "step":
                    progress.steps[event.index] = (event.done, event.total)
                elif event.kind == "save":
                    progress.saves[event.index] = (event.done, event.total)
                else:
                    # All previews, not only the last: a late subscriber must receive each of them.
                    progress.images.append(event)
            # asyncio objects are not thread-safe, and the publisher runs in the dispatcher's thread.
            for subscription in self.subscriptions.get(job, ()):
                subscription.loop.call_soon_threadsafe(subscription.put, event)

    def wake_all(self) -> None:
        """Send a `state` event to all subscribers, so that they read the state of their jobs again."""
        with self.lock:
            jobs = list(self.subscriptions)
        for job in jobs:
            self.publish(job, JobEvent("state"))

    def forget(self, job: str) -> None:
        """Delete the stored progress of a job that has ended or was requeued."""
        with self.lock:
            self.progress.pop(job, None)

    def fraction(self, job: str, images: int, *, with_saving: bool = False) -> float:
        """Return the completed fraction, from 0 to 1, of a job with `images` images; see `Progress.fraction`."""
        with self.lock:
            progress = self.progress.get(job)
            return 0.0 if progress is None else progress.fraction(images, with_saving=with_saving)
