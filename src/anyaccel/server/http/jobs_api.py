"""Endpoints that submit, list, show, cancel and delete jobs, and return their events and images."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from pydantic import Field, ValidationError
from starlette.concurrency import run_in_threadpool

from anyaccel.errors import UsageError
from anyaccel.media.formats import SUFFIXES
from anyaccel.server.http.audio_api import begin_audio_job
from anyaccel.server.http.audio_request import AudioRequest
from anyaccel.server.http.errors import ApiError, describe_invalid
from anyaccel.server.http.generation_request import GenerationRequest
from anyaccel.server.http.image_request import EditRequest
from anyaccel.server.http.images_api import begin_image_job
from anyaccel.server.http.input_files import decode_data_url
from anyaccel.server.http.responses import FILE_HEADERS, KEEP_ALIVE, find_media_type, write_event
from anyaccel.server.http.service import ClientGoneError, Service, ServiceOf
from anyaccel.server.http.video_request import VideoRequest
from anyaccel.server.http.videos_api import begin_video_job
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
_FILES: dict[int | str, dict[str, Any]] = {
    200: {"description": "The file", "content": {item.media_type: {} for item in SUFFIXES.values()}},
    206: {"description": "The requested range of the file"},
    416: {"description": "The range is outside of the file"},
}
# The aliases are part of the published OpenAPI schema.
_JobId = Annotated[str, Path(alias="name")]
_ImageIndex = Annotated[int, Path(alias="index")]

router = APIRouter(prefix="/v1/jobs", responses=_ERRORS)


class JobRequest(EditRequest):
    """Body of a request for images, a video or audio, whichever the model generates."""

    output_format: Literal["png", "jpeg", "webp", "mp4", "webm", "gif", "wav", "flac"] | None = None  # type: ignore[assignment]
    seconds: Annotated[float | None, Field(gt=0, description="Length of a video or audio in seconds.")] = None
    num_frames: Annotated[int | None, Field(ge=1, description="Length of a video in frames.")] = None
    fps: Annotated[float | None, Field(gt=0, description="Frames per second of a video.")] = None
    inputs: Annotated[
        dict[str, str | list[str]] | None,
        Field(description="Input images as data URLs, such as `image`, `mask_image` and `control_image`."),
    ] = None


@router.post("", status_code=202, summary="Submit a job without waiting for it")
async def submit(body: JobRequest, request: Request, service: ServiceOf) -> dict[str, Any]:
    """Add a job to the queue and return its description without waiting for it to run."""
    service.check_ready()
    models = service.models
    facts = next(iter(models.values())) if body.model is None else models.get(body.model)
    kind = "image" if facts is None else facts.kind  # an unknown model is rejected later
    inputs = {
        name[:60]: [decode_data_url(url, f"inputs.{name[:60]}") for url in ([urls] if isinstance(urls, str) else urls)]
        for name, urls in (body.inputs or {}).items()
    }
    classes: dict[str, type[GenerationRequest]] = {"image": EditRequest, "video": VideoRequest, "audio": AudioRequest}
    values = body.model_dump(exclude={"inputs"}, exclude_none=True)
    if body.model is None and facts is not None:
        values["model"] = facts.name
    try:
        read = classes[kind].model_validate(values)
    except ValidationError as error:
        raise describe_invalid(error) from error
    if isinstance(read, EditRequest):
        if body.model is None:
            read.model = None
        job = await begin_image_job(service, request, read, inputs)
    elif isinstance(read, VideoRequest):
        job = await begin_video_job(service, request, read, inputs)
    else:
        assert isinstance(read, AudioRequest)
        job = await begin_audio_job(service, request, read, inputs)
    return await service.describe(job)


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
    responses=_FILES,
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
    if job is None or job.request.get("kind", "image") != "image" or not 0 <= index < len(files):
        raise ApiError(404, "image_not_found", f"{job_id} has no image {index}, or it has expired")
    return _send_file(service, job, files[index])


@router.get(
    "/{name}/files/{file}", response_model=None, summary="Fetch a file of a video or audio job", responses=_FILES
)
async def fetch_file(
    job_id: _JobId, file: str, request: Request, service: ServiceOf, token: str | None = None
) -> Response:
    """Return a result file of a job, as named by the URLs in the job.

    The token in these URLs is accepted instead of the API key.
    """
    if token is not None and service.signer.is_signed(job_id, file, token):
        job = await run_in_threadpool(service.jobs.get, job_id)
    else:
        job = await service.find(request, job_id)
    if job is None:
        raise ApiError(404, "job_not_found", f"unknown job {job_id[:60]!r}; it may have expired")
    return _send_file(service, job, file)


def _send_file(service: Service, job: Job, name: str) -> Response:
    file = service.jobs.find_file(job, name)
    if file is None or file.suffix not in SUFFIXES or not file.is_file():  # deleted or expired since the job was read
        raise ApiError(404, "image_not_found", f"{job.id} has no file {name[:80]!r}, or it has expired")
    return FileResponse(file, media_type=find_media_type(file), headers=FILE_HEADERS)


@router.post("/{name}/cancel", summary="Cancel a job, even while it runs")
async def cancel(job_id: _JobId, request: Request, service: ServiceOf) -> dict[str, Any]:
    """Cancel a queued job immediately, or a running job at its next denoising step."""
    job = await service.find(request, job_id)
    return await service.describe(await run_in_threadpool(service.dispatcher.cancel, job.id))


@router.delete("/{name}", response_model=None, summary="Delete an ended job and its files")
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
            elif event.kind in ("step", "save"):
                yield write_event(event.kind, {"index": event.index, "done": event.done, "total": event.total})
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
