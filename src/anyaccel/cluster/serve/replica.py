"""Replica: a worker that serves all models on one device, in a process supervised by Ray Serve."""

from __future__ import annotations

import asyncio
import logging
import os
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
from anyaccel.server.worker.worker import Worker, make_load_failed

__all__ = ["Replica"]

_LOG = logging.getLogger(__name__)
# How long a replica that failed to load reports its error before Serve replaces it.
_FAILURE_VISIBLE_S = 20.0


class Replica:
    """Ray Serve deployment that generates one image per request and streams progress messages."""

    def __init__(self, settings: ServerSettings, counted_by_ray: bool) -> None:
        use_one_malloc_arena()
        self.settings = settings
        self.mailboxes: dict[str, _Mailbox] = {}
        self.load_error: LoadFailed | None = None
        self.heartbeat: Heartbeat | None = None
        """Heartbeat that no stream has sent yet."""
        self.last_heartbeat_at = self.created_at = time.monotonic()
        self.models: tuple[ModelFacts, ...] = ()
        # Serve retries a constructor that raises: https://github.com/ray-project/ray/issues/31121. The service should
        # end with the reason instead.
        try:
            if not counted_by_ray:
                # The lock stays open as long as the replica lives.
                device, self.device_lock = claim_device(settings.device)
                settings = replace(settings, device=device)
            self.worker = Worker(settings, self._on_message)
            threading.Thread(target=self.worker.beat, daemon=True).start()
            self.models = self.worker.load()
        except Exception as error:  # noqa: BLE001 - reported by the service
            self.load_error = make_load_failed(error)
            return

    def facts(self) -> tuple[ModelFacts, ...] | LoadFailed:
        """Return the properties of the loaded models, or the error that occurred while loading them."""
        return self.load_error or self.models

    async def generate(self, message: RunJob) -> AsyncIterator[list[Any]]:
        """Run a job for a single image, and yield lists of messages about its progress and result.

        If the caller disconnects or cancels the request, generation stops at the next step.
        """
        if self.load_error is not None:
            yield [self.load_error]
            return
        mailbox = self.mailboxes[message.job] = _Mailbox()
        self.worker.begin(message)
        try:
            ended = False
            while not ended:
                messages = await mailbox.take()
                ended = any(isinstance(item, ImageDone | JobFailed | JobStopped) for item in messages)
                # Heartbeats have no stream of their own: the next stream sends the latest one.
                heartbeat, self.heartbeat = self.heartbeat, None
                yield [*messages, *([heartbeat] if heartbeat is not None else [])]
        finally:
            self.worker.cancel(message.job)
            del self.mailboxes[message.job]

    def check_health(self) -> None:
        """Raise if the model failed to load or the worker sends no heartbeats, so that Ray Serve replaces this replica.

        Ray Serve calls this method periodically.
        """
        limit = self.settings.limits.hang_s
        if self.load_error is not None and time.monotonic() - self.created_at > _FAILURE_VISIBLE_S:
            raise RuntimeError(self.load_error.message)
        if self.load_error is None and time.monotonic() - self.last_heartbeat_at > limit:
            raise RuntimeError(f"the worker has sent no heartbeat for {limit:.0f} s")

    def _on_message(self, message: Any) -> None:
        if isinstance(message, Heartbeat):
            self.last_heartbeat_at = time.monotonic()
            if message.stalled_s > self.settings.limits.hang_s:
                # Not by `check_health`, which Ray Serve does not call before the constructor has returned.
                _LOG.error("anyaccel: the device made no progress for %.0f s; ending the replica", message.stalled_s)
                os._exit(1)
            unsent = self.heartbeat
            self.heartbeat = (
                message if unsent is None else replace(message, batches=_add_counts(unsent.batches, message.batches))
            )
            return
        if isinstance(message, LoadProgress):
            return
        mailbox = self.mailboxes.get(message.job)
        if mailbox is not None:
            mailbox.put(message)


class _Mailbox:
    """Queue that passes messages about one image from the worker's threads to an asyncio coroutine."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.messages: list[Any] = []
        self.filled = asyncio.Event()

    def put(self, message: Any) -> None:
        # asyncio.Event is not thread-safe.
        self.loop.call_soon_threadsafe(self._put, message)

    def _put(self, message: Any) -> None:
        self.messages.append(message)
        self.filled.set()

    async def take(self) -> list[Any]:
        await self.filled.wait()
        self.filled.clear()
        taken, self.messages = self.messages, []
        return taken


def _add_counts(first: Any, second: Any) -> dict[int, int]:
    return {size: first.get(size, 0) + second.get(size, 0) for size in {*first, *second}}
