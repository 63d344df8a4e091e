"""State shared by all endpoints: job store, dispatcher, metrics and traces."""

from __future__ import annotations

import asyncio
import hashlib
import json
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

from anyaccel.errors import UsageError
from anyaccel.media.encode import estimate_bytes
from anyaccel.media.output import check_free_space
from anyaccel.server.http.added_loras import AddedLoras
from anyaccel.server.http.errors import NO_RETRY, ApiError
from anyaccel.server.http.input_files import name_inputs
from anyaccel.server.http.responses import Signer, describe_job, describe_video
from anyaccel.server.jobs.dispatcher import Dispatcher
from anyaccel.server.jobs.events import EventBus, JobEvent
from anyaccel.server.jobs.job_traces import JobTraces
from anyaccel.server.jobs.metrics import Metrics
from anyaccel.server.jobs.store import ENDED, Job, JobStore, KeyTakenError, QueueFullError
from anyaccel.server.settings import ServerSettings
from anyaccel.server.worker.job_spec import INPUT_MARK, SUFFIXES, JobSpec
from anyaccel.server.worker.messages import ModelFacts
from anyaccel.server.worker.transport import WorkerProcess, WorkerTransport
from anyaccel.storage.atomic_write import atomic_write

__all__ = ["ClientGoneError", "Service", "ServiceOf"]

_LOG = logging.getLogger(__name__)
# Seconds without an event after which a keep-alive is sent; proxies close idle streams.
_KEEP_ALIVE_S = 10.0


class ClientGoneError(Exception):
    """Error raised when the client disconnects while its request is waiting for a job."""


class Service:
    """The running service, which stores each request as a job and tracks the job until it ends."""

    def __init__(
        self, settings: ServerSettings, make_transport: Callable[[ServerSettings], WorkerTransport] = WorkerProcess
    ) -> None:
        self.settings = settings
        self.jobs = JobStore(settings.data)
        self.bus, self.metrics = EventBus(), Metrics(self.jobs)
        self.dispatcher = Dispatcher(settings, self.jobs, self.bus, self.metrics, make_transport)
        self.signer = Signer(_read_secret(settings.data))
        self.traces = JobTraces(settings.otlp)
        self.loras = AddedLoras(settings.lora_dir, settings.data / "loras.json")
        self.dispatcher.on_end += [self.metrics.record_end, self.traces.record_end]
        self.created = int(time.time())
        # Shutdown has two phases. `draining`: new jobs are rejected while accepted ones finish. `ended`: requests that
        # still wait get an error, because their jobs did not finish in time.
        self.draining = False
        self.ended = False
        self.closed = False

    def close(self) -> None:
        """Stop the worker, send the remaining traces and close the job store; safe to call more than once."""
        if self.closed:
            return
        self.closed = self.draining = True
        # The store is closed last: stopping the dispatcher requeues jobs and can end others.
        self.dispatcher.stop()
        self.traces.close()
        self.jobs.close()

    @property
    def models(self) -> dict[str, ModelFacts]:
        """The properties of the served models by name, starting with the default model."""
        return self.loras.merge(self.dispatcher.models)

    def check_ready(self) -> None:
        """Raise `ApiError` with status 503 if the service is still starting or is shutting down."""
        # Not `is_ready`: while a dead worker restarts, its models are known and new jobs can wait in the queue.
        if not self.dispatcher.models or self.draining:
            reason = "shutting down" if self.draining else self.dispatcher.start_state.message
            raise ApiError(503, "not_ready", f"the service is not ready: {reason}", headers={"Retry-After": "5"})

    async def accept(self, request: Request, spec: JobSpec, body: BaseModel, inputs: Mapping[str, list[bytes]]) -> Job:
        """Store a request as a job, notify the dispatcher and return the job.

        If the request repeats an idempotency key, the existing job is returned. Raises `ApiError` if the
        queue is full, the key was used for a different request or the job cannot be stored.
        """
        user = getattr(body, "user", None)
        # Digest of the body, not of the spec: if the client sets no seed, each spec has a different random one.
        digest = hashlib.sha256(f"{request.url.path} {_write_body(body)}".encode(errors="surrogatepass"))
        files = name_inputs(inputs)
        for name, content in files.items():
            digest.update(name.encode() + hashlib.sha256(content).digest())
        owner = str(request.state.owner)
        key = request.headers.get("idempotency-key")
        if key is not None and not 0 < len(key) <= 255:
            raise ApiError(400, "invalid_value", f"the Idempotency-Key must have 1 to 255 characters, not {len(key)}")
        try:
            await run_in_threadpool(self._check_free_space, spec)
            job, new = await run_in_threadpool(
                self.jobs.submit,
                spec.to_dict(),
                owner=owner,
                lane=f"{owner}/{user or ''}",
                key=key,
                request_digest=digest.hexdigest(),
                inputs=files,
                max_queue=self.settings.limits.max_queue,
            )
        except QueueFullError as error:
            wait = round(self.dispatcher.estimate_wait_s())
            raise ApiError(
                429,
                "queue_full",
                f"the queue is full ({self.settings.limits.max_queue} requests); try again in {wait} s",
                headers={"Retry-After": str(wait)},
            ) from error
        except (OSError, sqlite3.Error) as error:
            _LOG.exception("anyaccel: cannot store a job")
            message = "the service cannot store the request; its disk may be full"
            raise ApiError(503, "storage", message, headers={"Retry-After": "30"}) from error
        except KeyTakenError as error:
            message = "the Idempotency-Key was already used for a different request; use a new key"
            raise ApiError(409, "idempotency_key_reused", message) from error
        request.state.job = job.id
        if new:
            self.traces.record_job(job.id, self.traces.read_parent(dict(request.headers)))
            await run_in_threadpool(self.dispatcher.wake)
        return job

    def _check_free_space(self, spec: JobSpec) -> None:
        """Raise `ApiError` if the disk has no space for a video or audio, before anything is computed."""
        if spec.kind == "image":
            return  # small, and generated within seconds
        size = estimate_bytes(
            spec.kind, SUFFIXES[spec.output_format], width=spec.width, height=spec.height, frames=spec.num_frames or 0,
            seconds=spec.seconds or 0.0,
        )  # fmt: skip
        try:
            check_free_space(self.settings.data, size)
        except UsageError as error:
            _LOG.error("anyaccel: %s", error.message)
            message = "the service cannot store the result; its disk is almost full"
            raise ApiError(503, "storage", message, headers={"Retry-After": "30"}) from error

    async def find(self, request: Request, job_id: str) -> Job:
        """Return a job by ID; raise `ApiError` if it does not exist or belongs to another client."""
        job = await run_in_threadpool(self.jobs.get, job_id, owner=str(request.state.owner))
        if job is None:
            raise ApiError(404, "job_not_found", f"unknown job {job_id[:60]!r}; it may have expired")
        return job

    async def follow(self, request: Request, job: Job) -> AsyncIterator[JobEvent | None]:
        """Yield a job's events until the job ends, and None whenever a keep-alive message is due.

        Raises `ClientGoneError` if the client disconnects, and `ApiError` if the service shuts down.
        """
        # Subscribe before the first read of the state: a job that ends in between still wakes this request.
        with self.bus.subscribe(job.id) as events:
            disconnect = asyncio.create_task(_wait_for_disconnect(request))
            try:
                while True:
                    current = await run_in_threadpool(self.jobs.get, job.id)
                    if current is None or current.state in ENDED:
                        for event in events.drain():
                            yield event
                        return
                    if self.ended:
                        message = f"the service is shutting down; {job.id} will continue after a restart"
                        raise ApiError(503, "ending", message, headers={**NO_RETRY, "anyaccel-job": job.id})
                    while True:
                        next_event = await _first(events.next(_KEEP_ALIVE_S), disconnect)
                        yield next_event
                        if next_event is not None and next_event.kind == "state":
                            break
            finally:
                disconnect.cancel()

    async def wait(self, request: Request, job: Job) -> Job:
        """Wait until a job has ended, and return the job with its final state.

        Raises `ClientGoneError` if the client disconnects.
        """
        async for _ in self.follow(request, job):
            pass
        return await self.find(request, job.id)

    async def read_images(self, job: Job) -> list[bytes]:
        """Return the contents of a finished job's image files; raise `ApiError` if they have expired."""
        names = (job.result or {}).get("files", [])
        files = [self.jobs.find_file(job, name) for name in names]
        try:
            return [await run_in_threadpool(file.read_bytes) for file in files if file is not None]
        except FileNotFoundError as error:
            raise ApiError(404, "job_not_found", f"the images of {job.id} have expired") from error

    async def describe(self, job: Job) -> dict[str, Any]:
        """Return a job as a JSON-serializable dict.

        The dict includes the progress of a running job, and the number of older jobs in the queue for a
        queued one.
        """
        return await run_in_threadpool(self._describe, job)

    async def describe_all(self, jobs: Sequence[Job]) -> list[dict[str, Any]]:
        """Return several jobs as JSON-serializable dicts; see `describe`."""
        return await run_in_threadpool(lambda: [self._describe(job) for job in jobs])

    def _describe(self, job: Job) -> dict[str, Any]:
        waiting = self.jobs.count_before(job) if job.state == "queued" else None
        return describe_job(job, self.signer, self._find_fraction(job), waiting)

    async def describe_video(self, job: Job) -> dict[str, Any]:
        """Return a video job in the format of OpenAI's video endpoints."""
        return describe_video(job, self._find_fraction(job), self.settings.limits.keep_s)

    def _find_fraction(self, job: Job) -> float:
        if job.state != "running":
            return 0.0
        is_saved = job.request.get("kind", "image") != "image"
        return self.bus.fraction(job.id, len(job.request["seeds"]), with_saving=is_saved)

    def read_kept_inputs(self, job: Job) -> dict[str, list[bytes]]:
        """Return the input images of a finished job, which are stored with its results."""
        inputs: dict[str, list[bytes]] = {}
        for name in sorted((job.result or {}).get("files", [])):
            file, (_, _, input_name) = self.jobs.find_file(job, name), name.partition(INPUT_MARK)
            if not input_name:
                continue
            if file is None or not file.is_file():
                raise ApiError(404, "video_not_found", f"the files of {job.id} have expired")
            inputs.setdefault(input_name.partition(".")[0], []).append(file.read_bytes())
        return inputs


# Order of the fields in version 0.1: a request must have the same digest after an update.
_DIGEST_FIELDS = (
    "prompt", "model", "n", "size", "response_format", "output_format", "output_compression", "stream",
    "partial_images", "user", "quality", "style", "moderation", "background", "seed", "negative_prompt",
    "num_inference_steps", "guidance_scale", "lora", "lora_scale", "strength", "input_fidelity",
)  # fmt: skip


def _write_body(body: BaseModel) -> str:
    values = body.model_dump(exclude_none=True)
    ordered = {name: values.pop(name) for name in _DIGEST_FIELDS if name in values}
    return json.dumps({**ordered, **values}, separators=(",", ":"), ensure_ascii=False)


def _find_service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


# Annotation of an endpoint parameter into which FastAPI injects the service.
ServiceOf = Annotated[Service, Depends(_find_service)]


async def _wait_for_disconnect(request: Request) -> None:
    # `Request.is_disconnected` only polls. Messages before the disconnect belong to the body.
    while (await request.receive())["type"] != "http.disconnect":
        continue


async def _first(awaitable: Any, disconnect: asyncio.Task[None]) -> JobEvent | None:
    """Return the result of `awaitable`; raise `ClientGoneError` if the client disconnects first."""
    task = asyncio.ensure_future(awaitable)
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if disconnect.done() and not task.done():
            raise ClientGoneError
        return await task  # type: ignore[no-any-return]
    finally:
        task.cancel()


def _read_secret(folder: Path) -> bytes:
    """Return the secret key that signs image URLs.

    The key is created on first use, in a file that only the current user can read.
    """
    file = folder / "secret"  # stored, because URLs must stay valid after a restart
    if not file.exists():
        atomic_write(file, secrets.token_bytes(32), mode=0o600)
    return file.read_bytes()
