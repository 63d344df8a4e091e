"""The endpoints for jobs: submit, look, listen, fetch, cancel, delete."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool

from anyaccel.errors import UsageError
from anyaccel.server.http.errors import ApiError
from anyaccel.server.http.image_request import ImageRequest
from anyaccel.server.http.images_api import begin_job
from anyaccel.server.http.responses import write_event
from anyaccel.server.http.service import ClientGoneError, Service, ServiceOf
from anyaccel.server.jobs.store import ENDED, Job

__all__ = ["router"]

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": words}
    for status, words in {
        400: "The request is wrong",
        401: "The key is wrong",
        404: "There is no such job",
        408: "The request came too slowly",
        409: "The job has not ended, or the Idempotency-Key was used for another request",
        413: "The request is too large",
        429: "The queue is full",
        503: "The service is not ready",
    }.items()
}
_KINDS = {"png": "image/png", "jpg": "image/jpeg", "webp": "image/webp"}


router = APIRouter(prefix="/v1/jobs", responses=_ERRORS)


@router.post("", status_code=202, summary="Ask for pictures, and be answered at once")
async def submit(body: ImageRequest, request: Request, service: ServiceOf) -> dict[str, Any]:
    """A job, which the worker takes when its turn comes."""
    return await service.describe(await begin_job(service, request, body))


@router.get("", summary="The newest jobs")
async def list_jobs(
    request: Request,
    service: ServiceOf,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    before: Annotated[str | None, Query(description="A job: those that came before it.")] = None,
) -> dict[str, Any]:
    """Those of the one who asks, the newest first."""
    last = None if before is None else await service.find(request, before)
    owner = str(request.state.owner)
    found = await run_in_threadpool(service.jobs.list, owner=owner, most=limit + 1, before=last)
    jobs = await service.describe_all(found[:limit])
    return {"object": "list", "data": jobs, "has_more": len(found) > limit}


@router.get("/{name}", summary="One job: its state, its progress, its pictures")
async def show(name: str, request: Request, service: ServiceOf) -> dict[str, Any]:
    """As it is now."""
    return await service.describe(await service.find(request, name))


@router.get(
    "/{name}/events",
    response_model=None,
    summary="What happens to a job, as server-sent events",
    responses={200: {"description": "Events", "content": {"text/event-stream": {}}}},
)
async def listen(name: str, request: Request, service: ServiceOf) -> Response:
    """Its state, each step, each preview, and its state at the end."""
    job = await service.find(request, name)
    return StreamingResponse(
        _tell(service, request, job), media_type="text/event-stream", headers={"cache-control": "no-store"}
    )


@router.get(
    "/{name}/images/{place}",
    response_model=None,
    summary="A picture of a job",
    responses={200: {"description": "The file", "content": {kind: {} for kind in _KINDS.values()}}},
)
async def fetch(name: str, place: int, request: Request, service: ServiceOf, token: str | None = None) -> Response:
    """The file; with a token, which comes with a job's addresses, no key is needed."""
    if token is not None and service.signer.is_signed(name, place, token):
        job = await run_in_threadpool(service.jobs.get, name)
    else:
        job = await service.find(request, name)
    files = [] if job is None else (job.result or {}).get("files", [])
    if job is None or not 0 <= place < len(files):
        raise ApiError(404, "image_not_found", "there is no such picture")
    file = service.jobs.find_file(job, files[place])
    if file is None or not file.is_file():
        raise ApiError(404, "image_not_found", "there is no such picture")
    headers = {"cache-control": "private, max-age=86400, immutable", "x-content-type-options": "nosniff"}
    return FileResponse(file, media_type=_KINDS[file.suffix[1:]], headers=headers)


@router.post("/{name}/cancel", summary="Stop a job, also while it denoises")
async def cancel(name: str, request: Request, service: ServiceOf) -> dict[str, Any]:
    """One that waits ends at once, one that runs at its next step."""
    job = await service.find(request, name)
    return await service.describe(await run_in_threadpool(service.dispatcher.cancel, job.id))


@router.delete("/{name}", response_model=None, summary="Forget a job that has ended, and its pictures")
async def delete(name: str, request: Request, service: ServiceOf) -> Response:
    """One that has not ended is to be cancelled before."""
    job = await service.find(request, name)
    try:
        await run_in_threadpool(service.jobs.delete, job.id)
    except UsageError as error:
        raise ApiError(409, "job_not_ended", f"{error.message}; {error.hint}") from error
    return JSONResponse({"id": job.id, "object": "job", "deleted": True})


async def _tell(service: Service, request: Request, job: Job) -> AsyncIterator[bytes]:
    """The job's state, its steps and previews, and its state at the end."""
    yield write_event("state", await service.describe(job))
    try:
        async for news in service.follow(request, job):
            if news is None:
                yield b": still at it\n\n"
            elif news.kind == "step":
                told = {"picture": news.picture, "done": news.done, "total": news.total}
                yield write_event("step", told)
            elif news.kind in ("preview", "made"):
                shown = base64.b64encode(news.content).decode()
                kind = f"image/{job.request['output_format']}"
                yield write_event(news.kind, {"picture": news.picture, "image": f"data:{kind};base64,{shown}"})
            elif news.kind == "state":
                current = await service.find(request, job.id)
                if current.state not in ENDED:
                    yield write_event("state", await service.describe(current))
        yield write_event("state", await service.describe(await service.find(request, job.id)))
    except ApiError as error:
        yield write_event("error", error.to_dict())
    except ClientGoneError:
        return
