"""Endpoints that submit, list, show, cancel and delete jobs, and return their events and images."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool

from anyaccel.errors import UsageError
from anyaccel.server.http.errors import ApiError
from anyaccel.server.http.image_request import ImageRequest
from anyaccel.server.http.images_api import begin_job
from anyaccel.server.http.responses import KEEP_ALIVE, write_event
from anyaccel.server.http.service import ClientGoneError, Service, ServiceOf
from anyaccel.server.jobs.store import ENDED, Job

__all__ = ["router"]

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": description}
    for status, description in {
        400: "Invalid request",
        401: "Invalid API key",
        404: "Unknown job",
        408: "The client sent the request too slowly",
        409: "The job has not ended, or the Idempotency-Key was used for a different request",
        413: "The request is too large",
        429: "The queue is full",
        503: "The service is not ready",
    }.items()
}
_MEDIA_TYPES = {"png": "image/png", "jpg": "image/jpeg", "webp": "image/webp"}
# The aliases are part of the published OpenAPI schema.
_JobId = Annotated[str, Path(alias="name")]
_ImageIndex = Annotated[int, Path(alias="index")]

router = APIRouter(prefix="/v1/jobs", responses=_ERRORS)


@router.post("", status_code=202, summary="Submit a job without waiting for it")
async def submit(body: ImageRequest, request: Request, service: ServiceOf) -> dict[str, Any]:
    """Add a job to the queue and return its description without waiting for it to run."""
    return await service.describe(await begin_job(service, request, body))


@router.get("", summary="List the newest jobs")
async def list_jobs(
    request: Request,
    service: ServiceOf,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    before: Annotated[str | None, Query(description="List only jobs that are older than this one.")] = None,
) -> dict[str, Any]:
    """Return the client's jobs, newest first."""
    before_job = None if before is None else await service.find(request, before)
    owner = str(request.state.owner)
    # One more than the limit, for `has_more`.
    jobs = await run_in_threadpool(service.jobs.list, owner=owner, limit=limit + 1, before=before_job)
    data = await service.describe_all(jobs[:limit])
    return {"object": "list", "data": data, "has_more": len(jobs) > limit}


@router.get("/{name}", summary="Show a job: state, progress and images")
async def show(job_id: _JobId, request: Request, service: ServiceOf) -> dict[str, Any]:
    """Return a job's state, progress and image URLs."""
    return await service.describe(await service.find(request, job_id))


@router.get(
    "/{name}/events",
    response_model=None,
    summary="Stream the events of a job as server-sent events",
    responses={200: {"description": "Events", "content": {"text/event-stream": {}}}},
)
async def stream_events(job_id: _JobId, request: Request, service: ServiceOf) -> Response:
    """Stream a job's state changes, steps, previews and images as server-sent events."""
    job = await service.find(request, job_id)
    return StreamingResponse(
        _make_events(service, request, job), media_type="text/event-stream", headers={"cache-control": "no-store"}
    )


@router.get(
    "/{name}/images/{index}",
    response_model=None,
    summary="Fetch an image of a job",
    responses={200: {"description": "The file", "content": {media_type: {} for media_type in _MEDIA_TYPES.values()}}},
)
async def fetch(
    job_id: _JobId, index: _ImageIndex, request: Request, service: ServiceOf, token: str | None = None
) -> Response:
    """Return one of a job's images as a file.

    The token in a job's image URLs is accepted instead of the API key.
    """
    # A signed URL works without the owner's key, so the owner is not checked.
    if token is not None and service.signer.is_signed(job_id, index, token):
        job = await run_in_threadpool(service.jobs.get, job_id)
    else:
        job = await service.find(request, job_id)
    files = [] if job is None else (job.result or {}).get("files", [])
    if job is None or not 0 <= index < len(files):
        raise ApiError(404, "image_not_found", f"{job_id} has no image {index}, or it has expired")
    file = service.jobs.find_file(job, files[index])
    if file is None or not file.is_file():  # deleted or expired since the job was read
        raise ApiError(404, "image_not_found", f"image {index} of {job_id} has expired")
    headers = {"cache-control": "private, max-age=86400, immutable", "x-content-type-options": "nosniff"}
    return FileResponse(file, media_type=_MEDIA_TYPES[file.suffix[1:]], headers=headers)


@router.post("/{name}/cancel", summary="Cancel a job, even while it runs")
async def cancel(job_id: _JobId, request: Request, service: ServiceOf) -> dict[str, Any]:
    """Cancel a queued job immediately, or a running job at its next denoising step."""
    job = await service.find(request, job_id)
    return await service.describe(await run_in_threadpool(service.dispatcher.cancel, job.id))


@router.delete("/{name}", response_model=None, summary="Delete an ended job and its images")
async def delete(job_id: _JobId, request: Request, service: ServiceOf) -> Response:
    """Delete a job that has ended; a job that is still queued or running must be cancelled first."""
    job = await service.find(request, job_id)
    try:
        await run_in_threadpool(service.jobs.delete, job.id)
    except UsageError as error:
        raise ApiError(409, "job_not_ended", f"{error.message}; {error.hint}") from error
    return JSONResponse({"id": job.id, "object": "job", "deleted": True})


async def _make_events(service: Service, request: Request, job: Job) -> AsyncIterator[bytes]:
    """Yield a job's state changes, steps, previews and images as server-sent events.

    The last event contains the final state.
    """
    yield write_event("state", await service.describe(job))
    try:
        async for event in service.follow(request, job):
            if event is None:
                yield KEEP_ALIVE
            elif event.kind == "step":
                yield write_event("step", {"index": event.index, "done": event.done, "total": event.total})
            elif event.kind in ("preview", "made"):
                encoded = base64.b64encode(event.content).decode()
                media_type = f"image/{job.request['output_format']}"
                data = {"index": event.index, "image": f"data:{media_type};base64,{encoded}"}
                yield write_event(event.kind, data)
            elif event.kind == "state":
                # The final state must be the last event: it is sent after the loop has drained the queue.
                current = await service.find(request, job.id)
                if current.state not in ENDED:
                    yield write_event("state", await service.describe(current))
        yield write_event("state", await service.describe(await service.find(request, job.id)))
    except ApiError as error:
        yield write_event("error", error.to_dict())
    except ClientGoneError:
        return
