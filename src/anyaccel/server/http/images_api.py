"""OpenAI's endpoints for pictures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile

from anyaccel.server.http.errors import FINAL, ApiError, describe_failure, describe_invalid
from anyaccel.server.http.image_request import EditRequest, ImageRequest, check_picture, describe_form, make_job_spec
from anyaccel.server.http.responses import describe_model, describe_pictures, make_event, write_event
from anyaccel.server.http.service import ClientGoneError, Service, ServiceOf
from anyaccel.server.jobs.store import Job
from anyaccel.server.worker.job_spec import Task

__all__ = ["begin_job", "router"]

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": words}
    for status, words in {
        202: "The job, where `Prefer: respond-async` was asked for",
        400: "The request is wrong",
        401: "The key is wrong",
        404: "There is no such model",
        408: "The request came too slowly",
        409: "The Idempotency-Key was used for another request, or the job was cancelled",
        413: "The request is too large",
        415: "The request is of another kind",
        429: "The queue is full",
        500: "The picture could not be made",
        503: "The service is not ready",
        504: "The picture was not made in time",
    }.items()
}
_PICTURES = {"image": "image", "image[]": "image", "mask": "mask_image"}
_MOST_FIELDS = 40


_MADE: dict[int | str, dict[str, Any]] = {
    200: {"description": "The pictures", "content": {"application/json": {}, "text/event-stream": {}}},
    **_ERRORS,
}
router = APIRouter(prefix="/v1")


@router.get("/models", summary="The models that are served", responses={401: _ERRORS[401]})
async def list_models(service: ServiceOf) -> dict[str, Any]:
    """All of them, the default first."""
    models = [describe_model(facts, service.created) for facts in service.dispatcher.models.values()]
    return {"object": "list", "data": models}


@router.get("/models/{name:path}", summary="One model", responses={401: _ERRORS[401], 404: _ERRORS[404]})
async def show_model(name: str, service: ServiceOf) -> dict[str, Any]:
    """What it can do, and on what."""
    facts = service.dispatcher.models.get(name)
    if facts is None:
        raise ApiError(404, "model_not_found", f"there is no model {name[:80]!r} here", param="model")
    return describe_model(facts, service.created)


@router.post("/images/generations", response_model=None, summary="Pictures from a prompt", responses=_MADE)
async def generate(body: ImageRequest, request: Request, service: ServiceOf) -> Response:
    """OpenAI's endpoint, with diffusers' own parameters besides."""
    job = await begin_job(service, request, body)
    return await _answer(service, request, body, job)


@router.post(
    "/images/edits",
    response_model=None,
    summary="Pictures from a picture and a prompt",
    openapi_extra=describe_form(),
    responses=_MADE,
)
async def edit(request: Request, service: ServiceOf) -> Response:
    """OpenAI's endpoint; where there is a mask, only what it shows white changes."""
    body, pictures = await _read_form(request)
    job = await begin_job(service, request, body, pictures)
    return await _answer(service, request, body, job)


async def begin_job(
    service: Service, request: Request, body: ImageRequest, pictures: dict[str, bytes] | None = None
) -> Job:
    """Check a request and keep it as a job; a picture to begin with makes it an edit, a mask an inpainting."""
    service.check_ready()
    pictures = pictures or {}
    limits = service.settings.limits
    task: Task = "generate"
    size = None
    if pictures:
        task = "inpaint" if "mask_image" in pictures else "edit"
        sizes = [await run_in_threadpool(check_picture, content, name, limits) for name, content in pictures.items()]
        size = sizes[0]
    work = make_job_spec(body, task, service.dispatcher.models, limits, size)
    return await service.accept(request, work, body, pictures)


async def _answer(service: Service, request: Request, body: ImageRequest, job: Job) -> Response:
    headers = {"anyaccel-job": job.id}
    if "respond-async" in request.headers.get("prefer", ""):
        return JSONResponse(await service.describe(job), 202, {**headers, "preference-applied": "respond-async"})
    leaves_work = "idempotency-key" in request.headers  # one who can ask again may come back for it
    if body.stream:
        events = _stream(service, request, job, leaves_work)
        return StreamingResponse(
            events, media_type="text/event-stream", headers={**headers, "cache-control": "no-store"}
        )
    try:
        ended = await service.wait(request, job)
    except ClientGoneError:
        if not leaves_work:
            await run_in_threadpool(service.dispatcher.cancel, job.id)
        return Response(status_code=499)
    _check_done(ended)
    contents = await service.read_pictures(ended)
    base = str(request.base_url).rstrip("/")
    told = describe_pictures(ended, contents, service.signer, as_url=body.response_format == "url", base=base)
    return JSONResponse(told, headers=headers)


def _check_done(job: Job) -> None:
    if job.state == "cancelled":
        raise ApiError(409, "cancelled", "the job was cancelled", headers=FINAL)
    if job.state != "done":
        raise describe_failure(job.error)


async def _stream(service: Service, request: Request, job: Job, leaves_work: bool) -> AsyncIterator[bytes]:
    """Previews as they come, and each picture when it is there."""
    kind = "image_generation" if job.request["task"] == "generate" else "image_edit"
    size = f"{job.request['width']}x{job.request['height']}"
    sent: set[int] = set()
    ended = False
    try:
        async for news in service.follow(request, job):
            now = int(time.time())
            if news is None:
                yield b": still at it\n\n"
            elif news.kind == "preview":
                yield make_event(
                    f"{kind}.partial_image", job, news.content, now,
                    index=news.picture, size=size, partial_image_index=news.number,
                )  # fmt: skip
            elif news.kind == "made":
                sent.add(news.picture)
                yield make_event(f"{kind}.completed", job, news.content, now, index=news.picture, size=size)
        ended = True
        last = await service.find(request, job.id)
        _check_done(last)
        for place, content in enumerate(await service.read_pictures(last)):
            if place not in sent:
                yield make_event(f"{kind}.completed", last, content, int(time.time()), index=place, size=size)
    except ApiError as error:
        yield write_event("error", {"type": "error", **error.to_dict()})
    except ClientGoneError:
        return
    finally:
        if not ended and not leaves_work:
            # Not awaited: whoever cancelled this would cancel that too.
            asyncio.get_running_loop().run_in_executor(None, service.dispatcher.cancel, job.id)


async def _read_form(request: Request) -> tuple[EditRequest, dict[str, bytes]]:
    kind = request.headers.get("content-type", "")
    if not kind.startswith("multipart/form-data"):
        raise ApiError(
            415, "unsupported_media_type", "an edit comes as multipart/form-data, with its picture in `image`"
        )
    fields: dict[str, str] = {}
    pictures: dict[str, bytes] = {}
    form: FormData
    async with request.form(max_files=4, max_fields=_MOST_FIELDS) as form:
        for name, value in form.multi_items():
            if isinstance(value, UploadFile):
                place = _PICTURES.get(name)
                if place is None:
                    raise ApiError(400, "unknown_parameter", f"there is no file {name[:60]!r}", param=name[:60])
                if place in pictures:
                    raise ApiError(400, "too_many_images", "one picture is edited at a time", param="image")
                pictures[place] = await value.read()
            elif name in _PICTURES:
                raise ApiError(400, "invalid_image", f"{name} is a file", param=name)
            else:
                fields[name] = value
    if "image" not in pictures:
        raise ApiError(400, "missing_required_parameter", "image is missing", param="image")
    try:
        return EditRequest.model_validate_strings(fields), pictures
    except ValidationError as error:
        raise describe_invalid(error) from error
