"""A replica: one device of the cluster with the models of a service on it, in a process that Ray Serve keeps alive."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from anyaccel.cluster.device_slots import claim_device
from anyaccel.server.settings import ServerSettings
from anyaccel.server.worker.malloc_arenas import use_one_malloc_arena
from anyaccel.server.worker.messages import (
    Heartbeat,
    ImageDone,
    JobFailed,
    JobStopped,
    LoadFailed,
    LoadProgress,
    ModelFacts,
    RunJob,
)
from anyaccel.server.worker.worker import Worker, describe_start

__all__ = ["Replica"]

_PATIENCE_S = 20.0
"""A replica that cannot start says why, to whoever asks in this time, before it is replaced."""


class Replica:
    """What Serve runs; a picture is one request, whose answer is a stream of what becomes of it."""

    def __init__(self, settings: ServerSettings, counted_by_ray: bool) -> None:
        use_one_malloc_arena()
        self.settings = settings
        self.outlets: dict[str, _Outlet] = {}
        self.broken: LoadFailed | None = None
        self.last_beat: Heartbeat | None = None
        self.last_sign = self.born = time.monotonic()
        self.models: tuple[ModelFacts, ...] = ()
        try:
            if not counted_by_ray:
                device, self.claim = claim_device(settings.device)
                settings = replace(settings, device=device)
            self.worker = Worker(settings, self._tell)
            self.models = self.worker.load()
        except Exception as error:  # noqa: BLE001 - whatever it is, the service hears of it
            self.broken = describe_start(error)
            return
        threading.Thread(target=self.worker.beat, daemon=True).start()

    def facts(self) -> tuple[ModelFacts, ...] | LoadFailed:
        """The models with their plans here, or why there are none."""
        return self.broken or self.models

    async def make(self, said: RunJob) -> AsyncIterator[list[Any]]:
        """Make the picture of a job that has one; what is told meanwhile goes out together.

        Where the caller goes away or cancels, the picture stops at its next step.
        """
        if self.broken is not None:
            yield [self.broken]
            return
        outlet = self.outlets[said.job] = _Outlet()
        self.last_sign = time.monotonic()
        self.worker.begin(said)
        try:
            ended = False
            while not ended:
                told = await outlet.take()
                ended = any(isinstance(one, ImageDone | JobFailed | JobStopped) for one in told)
                beat, self.last_beat = self.last_beat, None
                yield [*told, *([beat] if beat is not None else [])]
        finally:
            self.worker.cancel(said.job)
            del self.outlets[said.job]

    def check_health(self) -> None:
        """Asked by Serve: where this raises, the replica is replaced."""
        limit = self.settings.limits.hang_s
        if self.broken is not None and time.monotonic() - self.born > _PATIENCE_S:
            raise RuntimeError(self.broken.message)
        if self.outlets and time.monotonic() - self.last_sign > limit:
            raise RuntimeError(f"no step was taken for {limit:.0f} s")

    def _tell(self, message: Any) -> None:
        if isinstance(message, Heartbeat):
            before = self.last_beat
            self.last_beat = message if before is None else replace(message, rounds=_add(before.rounds, message.rounds))
            return
        self.last_sign = time.monotonic()
        if isinstance(message, LoadProgress):
            return
        outlet = self.outlets.get(message.job)
        if outlet is not None:
            outlet.put(message)


class _Outlet:
    """What threads tell of one picture, for the coroutine that sends it."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.waiting: list[Any] = []
        self.there = asyncio.Event()

    def put(self, message: Any) -> None:
        self.loop.call_soon_threadsafe(self._put, message)

    def _put(self, message: Any) -> None:
        self.waiting.append(message)
        self.there.set()

    async def take(self) -> list[Any]:
        await self.there.wait()
        self.there.clear()
        taken, self.waiting = self.waiting, []
        return taken


def _add(one: Any, other: Any) -> dict[int, int]:
    return {size: one.get(size, 0) + other.get(size, 0) for size in {*one, *other}}
