"""One service: its jobs, its worker, and what all of its endpoints need."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, Request
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool

from anyaccel.server.http.errors import FINAL, ApiError
from anyaccel.server.http.responses import Signer, describe_job
from anyaccel.server.jobs.dispatcher import Dispatcher
from anyaccel.server.jobs.events import EventBus, JobEvent
from anyaccel.server.jobs.job_traces import JobTraces
from anyaccel.server.jobs.metrics import Metrics
from anyaccel.server.jobs.store import ENDED, Job, JobStore, KeyTakenError, QueueFullError
from anyaccel.server.settings import ServerSettings
from anyaccel.server.worker.job_spec import JobSpec
from anyaccel.server.worker.worker_process import WorkerProcess, WorkerTransport
from anyaccel.storage.atomic_write import atomic_write

__all__ = ["ClientGoneError", "Service", "ServiceOf"]

_LOG = logging.getLogger(__name__)
_QUIET_S = 10.0
"""A stream in which nothing happens says so, so that nobody in between closes it."""


class ClientGoneError(Exception):
    """The client went away."""


class Service:
    """What endpoints work with."""

    def __init__(
        self, settings: ServerSettings, make_workplace: Callable[[ServerSettings], WorkerTransport] = WorkerProcess
    ) -> None:
        self.settings = settings
        self.jobs = JobStore(settings.data)
        self.bus, self.metrics = EventBus(), Metrics(self.jobs)
        self.dispatcher = Dispatcher(settings, self.jobs, self.bus, self.metrics, make_workplace)
        self.signer = Signer(_read_secret(settings.data))
        self.spans = JobTraces(settings.otlp)
        self.dispatcher.on_end += [self.metrics.note_end, self.spans.note_end]
        self.created = int(time.time())
        self.closed = self.draining = self.ended = False
        """Whether nothing more is taken on: the service was told to end."""

    def close(self) -> None:
        """End the worker, and let go of the jobs' file."""
        if self.closed:
            return
        self.closed = self.draining = True
        self.dispatcher.stop()
        self.spans.close()
        self.jobs.close()

    def check_ready(self) -> None:
        """Raise unless work is taken on now."""
        if not self.dispatcher.models or self.draining:
            words = "it is ending" if self.draining else self.dispatcher.start_state.words
            raise ApiError(503, "not_ready", f"the service is not ready: {words}", headers={"Retry-After": "5"})

    async def accept(self, request: Request, work: JobSpec, body: BaseModel, inputs: Mapping[str, bytes]) -> Job:
        """Keep a request as a job, before anybody is answered."""
        user = getattr(body, "user", None)
        asked = hashlib.sha256(f"{request.url.path} {body.model_dump_json(exclude_none=True)}".encode())
        for name, content in inputs.items():
            asked.update(name.encode() + hashlib.sha256(content).digest())
        owner = str(request.state.owner)
        key = request.headers.get("idempotency-key")
        if key is not None and not 0 < len(key) <= 255:
            raise ApiError(400, "invalid_value", "an Idempotency-Key has 1 to 255 characters")
        try:
            job, new = await run_in_threadpool(
                self.jobs.submit,
                work.to_dict(),
                owner=owner,
                lane=f"{owner}/{user or ''}",
                key=key,
                asked=asked.hexdigest(),
                inputs=inputs,
                max_queue=self.settings.limits.max_queue,
            )
        except QueueFullError as error:
            wait = round(self.dispatcher.guess_wait_s())
            raise ApiError(
                429,
                "queue_full",
                f"{self.settings.limits.max_queue} requests wait already; try again in {wait} s",
                headers={"Retry-After": str(wait)},
            ) from error
        except (OSError, sqlite3.Error) as error:
            _LOG.exception("anyaccel: a job cannot be kept")
            words = "the service cannot keep the request: is its disk full?"
            raise ApiError(503, "storage", words, headers={"Retry-After": "30"}) from error
        except KeyTakenError as error:
            raise ApiError(
                409, "idempotency_key_reused", "this Idempotency-Key was used for another request"
            ) from error
        request.state.job = job.id
        if new:
            self.spans.note_job(job.id, self.spans.read_parent(dict(request.headers)))
            await run_in_threadpool(self.dispatcher.wake)
        return job

    async def find(self, request: Request, name: str) -> Job:
        """A job of the one who asks."""
        found = await run_in_threadpool(self.jobs.get, name, owner=str(request.state.owner))
        if found is None:
            raise ApiError(404, "job_not_found", "there is no such job; it may have expired")
        return found

    async def follow(self, request: Request, job: Job) -> AsyncIterator[JobEvent | None]:
        """News of a job until it ends, None where there is none for a while; raises if the client goes away."""
        with self.bus.listening(job.id) as news:
            leaving = asyncio.create_task(_wait_for_leaving(request))
            try:
                while True:
                    current = await run_in_threadpool(self.jobs.get, job.id)
                    if current is None or current.state in ENDED:
                        for one in news.rest():
                            yield one
                        return
                    if self.ended:
                        words = f"the service ends; {job.id} is kept for its next start"
                        raise ApiError(503, "ending", words, headers={**FINAL, "anyaccel-job": job.id})
                    while True:
                        told = await _first(news.next(_QUIET_S), leaving)
                        if told is not None and told.kind == "state":
                            yield told
                            break
                        yield told
            finally:
                leaving.cancel()

    async def wait(self, request: Request, job: Job) -> Job:
        """Wait until a job has ended."""
        async for _ in self.follow(request, job):
            pass
        return await self.find(request, job.id)

    async def read_pictures(self, job: Job) -> list[bytes]:
        """The files of a job that is done."""
        names = (job.result or {}).get("files", [])
        files = [self.jobs.find_file(job, name) for name in names]
        try:
            return [await run_in_threadpool(file.read_bytes) for file in files if file is not None]
        except FileNotFoundError as error:
            raise ApiError(404, "job_not_found", "the job's pictures have expired") from error

    async def describe(self, job: Job) -> dict[str, Any]:
        """A job as its owner sees it."""
        return await run_in_threadpool(self._describe, job)

    async def describe_all(self, jobs: Sequence[Job]) -> list[dict[str, Any]]:
        """The same for several."""
        return await run_in_threadpool(lambda: [self._describe(job) for job in jobs])

    def _describe(self, job: Job) -> dict[str, Any]:
        share = self.bus.share(job.id, len(job.request["seeds"])) if job.state == "running" else 0.0
        waiting = self.jobs.count_before(job) if job.state == "queued" else None
        return describe_job(job, self.signer, share, waiting)


def _find_service(request: Request) -> Service:
    found: Service = request.app.state.service
    return found


ServiceOf = Annotated[Service, Depends(_find_service)]
"""How an endpoint asks for the service that it belongs to."""


async def _wait_for_leaving(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue


async def _first(awaited: Any, leaving: asyncio.Task[None]) -> JobEvent | None:
    """What is awaited, unless the client leaves first."""
    task = asyncio.ensure_future(awaited)
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if leaving.done() and not task.done():
            raise ClientGoneError
        return await task  # type: ignore[no-any-return]
    finally:
        task.cancel()


def _read_secret(folder: Path) -> bytes:
    """What addresses are signed with: made once, and read by this user alone."""
    file = folder / "secret"
    if not file.exists():
        atomic_write(file, secrets.token_bytes(32), mode=0o600)
    return file.read_bytes()
