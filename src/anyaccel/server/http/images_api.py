"""OpenAI-compatible image endpoints."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool

from anyaccel.server.http.errors import NO_RETRY, ApiError, describe_failure
from anyaccel.server.http.generation_request import read_form_fields
from anyaccel.server.http.image_request import FILE_FIELDS, EditRequest, ImageRequest, describe_form, make_job_spec
from anyaccel.server.http.input_files import check_images, check_input_files, read_form
from anyaccel.server.http.responses import KEEP_ALIVE, describe_images, describe_model, make_event, write_event
from anyaccel.server.http.service import ClientGoneError, Service, ServiceOf
from anyaccel.server.jobs.store import Job
from anyaccel.server.worker.job_spec import Task

__all__ = ["begin_image_job", "check_done", "router"]

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": description}
    for status, description in {
        202: "The job, if the request has `Prefer: respond-async`",
        400: "Invalid request",
        401: "Invalid API key",
        404: "Unknown model",
        408: "The client sent the request too slowly",
        409: "The Idempotency-Key was used for a different request, or the job was cancelled",
        413: "The request is too large",
        415: "Unsupported content type",
        429: "The queue is full",
        500: "Image generation failed",
        503: "The service is not ready",
        504: "The deadline passed before the images were finished",
    }.items()
}
_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "The images", "content": {"application/json": {}, "text/event-stream": {}}},
    **_ERRORS,
}
router = APIRouter(prefix="/v1")


@router.get("/models", summary="List the served models", responses={401: _ERRORS[401]})
async def list_models(service: ServiceOf) -> dict[str, Any]:
    """Return all served models, starting with the default model."""
    models = [describe_model(facts, service.created) for facts in service.models.values()]
    return {"object": "list", "data": models}


# `:path`, because Hub IDs contain a slash.
@router.get("/models/{name:path}", summary="Describe one model", responses={401: _ERRORS[401], 404: _ERRORS[404]})
async def show_model(name: str, service: ServiceOf) -> dict[str, Any]:
    """Return a model's device, tasks, image sizes and defaults."""
    facts = service.models.get(name)
    if facts is None:
        message = f"unknown model {name[:80]!r}; list the models with GET /v1/models"
        raise ApiError(404, "model_not_found", message, param="model")
    return describe_model(facts, service.created)


@router.post("/images/generations", response_model=None, summary="Generate images from a prompt", responses=_RESPONSES)
async def generate(body: ImageRequest, request: Request, service: ServiceOf) -> Response:
    """Generate images from a prompt.

    This endpoint is compatible with OpenAI's and also accepts diffusers arguments.
    """
    job = await begin_image_job(service, request, body)
    return await _respond(service, request, body, job)


@router.post(
    "/images/edits",
    response_model=None,
    summary="Edit an image with a prompt",
    openapi_extra=describe_form(),
    responses=_RESPONSES,
)
async def edit(request: Request, service: ServiceOf) -> Response:
    """Edit an image with a prompt.

    This endpoint is compatible with OpenAI's. With a mask, only the masked area changes.
    """
    form = await read_form(request, FILE_FIELDS, service.settings.limits)
    if not form.inputs or set(form.inputs) == {"mask_image"}:
        raise ApiError(400, "missing_required_parameter", "the file field 'image' is missing", param="image")
    body = read_form_fields(EditRequest, form.fields)
    job = await begin_image_job(service, request, body, form.inputs, from_form=True)
    return await _respond(service, request, body, job)


async def begin_image_job(
    service: Service,
    request: Request,
    body: ImageRequest,
    inputs: Mapping[str, list[bytes]] | None = None,
    *,
    from_form: bool = False,
) -> Job:
    """Validate a request, store it as a job and return the job.

    The task is `generate` without an image, `edit` with an image, and `inpaint` with an image and a
    mask.
    """
    service.check_ready()
    inputs = inputs or {}
    limits = service.settings.limits
    task: Task = "generate"
    if "image" in inputs:
        task = "inpaint" if "mask_image" in inputs else "edit"
    size = await check_images(inputs, limits)
    spec = make_job_spec(body, task, service.models, limits, size, from_form=from_form)
    check_input_files(inputs, service.models[spec.model], task)
    return await service.accept(request, spec, body, inputs)


async def _respond(service: Service, request: Request, body: ImageRequest, job: Job) -> Response:
    headers = {"anyaccel-job": job.id}
    if "respond-async" in request.headers.get("prefer", ""):
        return JSONResponse(await service.describe(job), 202, {**headers, "preference-applied": "respond-async"})
    # A disconnect cancels the job, unless the client has an idempotency key to fetch the result later.
    detached = "idempotency-key" in request.headers
    if body.stream:
        events = _stream(service, request, job, detached)
        return StreamingResponse(
            events, media_type="text/event-stream", headers={**headers, "cache-control": "no-store"}
        )
    try:
        ended_job = await service.wait(request, job)
    except ClientGoneError:
        if not detached:
            await run_in_threadpool(service.dispatcher.cancel, job.id)
        return Response(status_code=499)  # nginx's "client closed request"; only the log shows it
    check_done(ended_job)
    contents = await service.read_images(ended_job)
    base = str(request.base_url).rstrip("/")
    response = describe_images(ended_job, contents, service.signer, as_url=body.response_format == "url", base=base)
    return JSONResponse(response, headers=headers)


def check_done(job: Job) -> None:
    """Raise `ApiError` if a job that has ended has no result."""
    if job.state == "cancelled":
        raise ApiError(409, "cancelled", "the job was cancelled", headers=NO_RETRY)
    if job.state != "done":
        raise describe_failure(job.error)


async def _stream(service: Service, request: Request, job: Job, detached: bool) -> AsyncIterator[bytes]:
    """Yield a job's previews and finished images as server-sent events in OpenAI's format.

    If the client disconnects, the job is cancelled unless `detached` is true.
    """
    kind = "image_generation" if job.request["task"] == "generate" else "image_edit"
    size = f"{job.request['width']}x{job.request['height']}"
    sent: set[int] = set()
    ended = False
    try:
        async for event in service.follow(request, job):
            now = int(time.time())
            if event is None:
                yield KEEP_ALIVE
            elif event.kind == "preview":
                yield make_event(
                    f"{kind}.partial_image", job, event.content, now,
                    index=event.index, size=size, partial_image_index=event.number,
                )  # fmt: skip
            elif event.kind == "made":
                sent.add(event.index)
                yield make_event(f"{kind}.completed", job, event.content, now, index=event.index, size=size)
        ended = True
        ended_job = await service.find(request, job.id)
        check_done(ended_job)
        # The last image has no event of its own, because it ends the job. The others may have been sent already.
        for index, content in enumerate(await service.read_images(ended_job)):
            if index not in sent:
                yield make_event(f"{kind}.completed", ended_job, content, int(time.time()), index=index, size=size)
    except ApiError as error:
        # The status line has been sent, so the error must be an event.
        yield write_event("error", {"type": "error", **error.to_dict()})
    except ClientGoneError:
        return
    finally:
        if not ended and not detached:
            # Not awaited: if the task was cancelled, an await would raise before the job is cancelled.
            asyncio.get_running_loop().run_in_executor(None, service.dispatcher.cancel, job.id)
