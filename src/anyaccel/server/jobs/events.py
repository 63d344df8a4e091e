"""News of jobs, from the threads that hear of them to the requests that wait for them."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["EventBus", "JobEvent", "Progress", "Subscription"]

_MOST_WAITING = 64
"""News that a slow reader may fall behind; what is dropped then is steps and previews, oldest first."""


@dataclass(frozen=True)
class JobEvent:
    """Something happened to a job."""

    kind: Literal["step", "preview", "made", "state"]
    picture: int = 0
    done: int = 0
    total: int = 0
    number: int = 0
    content: bytes = b""


@dataclass
class Progress:
    """How far a job is: of each picture the steps that are done, and what was seen of it."""

    steps: dict[int, tuple[int, int]] = field(default_factory=dict)
    seen: list[JobEvent] = field(default_factory=list)
    """Previews, of which a picture has few, and pictures that are made."""

    def tell(self) -> list[JobEvent]:
        """Where it is, for one who comes late."""
        steps = [JobEvent("step", picture, done, total) for picture, (done, total) in self.steps.items()]
        return [*steps, *self.seen]

    def share(self, pictures: int) -> float:
        """Of all steps, those that are done, from 0 to 1."""
        return sum(done / total for done, total in self.steps.values() if total) / max(1, pictures)


class Subscription:
    """What one request hears of a job."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.waiting: deque[JobEvent] = deque()
        self.there = asyncio.Event()

    async def next(self, timeout_s: float) -> JobEvent | None:
        """The next news; None where there was none for so long."""
        if not self.waiting:
            self.there.clear()
            try:
                await asyncio.wait_for(self.there.wait(), timeout_s)
            except TimeoutError:
                return None
        return self.waiting.popleft() if self.waiting else None

    def rest(self) -> list[JobEvent]:
        """What has come and was not taken yet."""
        left = list(self.waiting)
        self.waiting.clear()
        return left

    def put(self, news: JobEvent) -> None:
        """Called in the loop's thread."""
        if len(self.waiting) >= _MOST_WAITING:
            passing = next((one for one in self.waiting if one.kind in ("step", "preview")), None)
            if passing is not None:
                self.waiting.remove(passing)
        self.waiting.append(news)
        self.there.set()


class EventBus:
    """Who listens to which job."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.listeners: dict[str, list[Subscription]] = {}
        self.progress: dict[str, Progress] = {}

    @contextmanager
    def listening(self, job: str) -> Iterator[Subscription]:
        """Hear of a job while the block runs, beginning with where it is."""
        subscription = Subscription()
        with self.lock:
            self.listeners.setdefault(job, []).append(subscription)
            known = self.progress.get(job)
            for news in [] if known is None else known.tell():
                subscription.put(news)
        try:
            yield subscription
        finally:
            with self.lock:
                left = self.listeners[job]
                left.remove(subscription)
                if not left:
                    del self.listeners[job]

    def publish(self, job: str, news: JobEvent) -> None:
        """Tell all that listen, from any thread."""
        with self.lock:
            if news.kind != "state":
                known = self.progress.setdefault(job, Progress())
                if news.kind == "step":
                    known.steps[news.picture] = (news.done, news.total)
                else:
                    known.seen.append(news)
            for one in self.listeners.get(job, ()):
                one.loop.call_soon_threadsafe(one.put, news)

    def wake_all(self) -> None:
        """Let everybody who listens look again."""
        with self.lock:
            jobs = list(self.listeners)
        for job in jobs:
            self.publish(job, JobEvent("state"))

    def forget(self, job: str) -> None:
        """A job ended, or begins anew: how far it was is of no interest any more."""
        with self.lock:
            self.progress.pop(job, None)

    def share(self, job: str, pictures: int) -> float:
        """How far a job is, from 0 to 1."""
        with self.lock:
            known = self.progress.get(job)
            return 0.0 if known is None else known.share(pictures)
