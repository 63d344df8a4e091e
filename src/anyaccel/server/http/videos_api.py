"""OpenAI-compatible video endpoints: a video is a job, and its ID is the ID of the job."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.concurrency import run_in_threadpool

from anyaccel.errors import UsageError
from anyaccel.server.http.errors import NO_RETRY, ApiError, describe_failure, describe_invalid
from anyaccel.server.http.generation_request import check_text, read_form_fields
from anyaccel.server.http.input_files import Form, check_images, check_input_files, decode_data_url, read_form
from anyaccel.server.http.responses import FILE_HEADERS, find_media_type
from anyaccel.server.http.service import Service, ServiceOf
from anyaccel.server.http.video_request import FILE_FIELDS, VideoRequest, describe_form, make_video_spec
from anyaccel.server.jobs.store import ENDED, Job
from anyaccel.server.worker.job_spec import Task, read_job_spec

__all__ = ["begin_video_job", "router"]

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": description}
    for status, description in {
        400: "Invalid request",
        401: "Invalid API key",
        404: "Unknown model or video",
        408: "The client sent the request too slowly",
        409: "The video is not finished, or the Idempotency-Key was used for a different request",
        413: "The request is too large",
        415: "Unsupported content type",
        429: "The queue is full",
        503: "The service is not ready",
    }.items()
}
# The client asks again after this time. It reads the header of the first answer only.
_POLL_MS = 1000
# Of videos, thumbnails and sprite sheets.
_MEDIA_TYPES = ("video/mp4", "video/webm", "image/webp", "image/gif", "image/jpeg")
_VideoId = Annotated[str, Path(alias="video_id")]
_Variant = Literal["video", "thumbnail", "spritesheet"]

router = APIRouter(prefix="/v1/videos", responses=_ERRORS)


@router.post("", summary="Submit a video", openapi_extra=describe_form())
async def create(request: Request, service: ServiceOf) -> dict[str, Any]:
    """Add a video to the queue and return it without waiting for it."""
    form, from_form = await _read_request(request, service)
    reference = _pop_reference(form)
    if reference is not None:
        form.inputs["image"] = [reference]
    body = read_form_fields(VideoRequest, form.fields) if from_form else _read_json(form.fields)
    return await service.describe_video(await begin_video_job(service, request, body, form.inputs, from_form=from_form))


@router.get("", summary="List the videos")
async def list_videos(
    request: Request,
    service: ServiceOf,
    after: Annotated[str | None, Query(description="List only videos that follow this one.")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> dict[str, Any]:
    """Return the client's videos, by default the newest first."""
    after_job = None if after is None else await _find(service, request, after)
    owner = str(request.state.owner)
    jobs = await run_in_threadpool(
        lambda: service.jobs.page(kind="video", owner=owner, limit=limit + 1, after=after_job, ascending=order == "asc")
    )
    data = [await service.describe_video(job) for job in jobs[:limit]]
    ids = [video["id"] for video in data]
    first, last = (ids[0], ids[-1]) if ids else (None, None)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": len(jobs) > limit}


# Before the routes with an ID, whose path would match.
@router.post("/edits", include_in_schema=False)
@router.post("/extensions", include_in_schema=False)
@router.post("/characters", include_in_schema=False)
@router.get("/characters/{name}", include_in_schema=False)
async def reject_unsupported(request: Request) -> Response:
    """Reject the routes of OpenAI's API that diffusers pipelines do not support."""
    message = f"{request.url.path} is not supported; submit a new video to /v1/videos, or change one with its /remix"
    raise ApiError(501, "not_supported", message, headers=NO_RETRY)


@router.get("/{video_id}", summary="Show a video: status and progress")
async def show(video_id: _VideoId, request: Request, service: ServiceOf) -> Response:
    """Return a video's status and progress."""
    job = await _find(service, request, video_id)
    headers = {} if job.state in ENDED else {"openai-poll-after-ms": str(_POLL_MS)}
    return JSONResponse(await service.describe_video(job), headers=headers)


@router.get(
    "/{video_id}/content",
    response_model=None,
    summary="Download a video, or images of its frames",
    responses={
        200: {"description": "The file", "content": {media_type: {} for media_type in _MEDIA_TYPES}},
        206: {"description": "The requested range of the file"},
        416: {"description": "The range is outside of the file"},
    },
)
async def download(video_id: _VideoId, request: Request, service: ServiceOf, variant: _Variant = "video") -> Response:
    """Return the file of a finished video, its thumbnail, or a sprite sheet of its frames."""
    job = await _find(service, request, video_id)
    if job.state in ("failed", "cancelled"):
        raise _describe_end(job)
    if job.state != "done":
        message = f"the video is not finished ({job.state}); read its status with GET /v1/videos/{job.id}"
        raise ApiError(409, "video_not_ready", message, headers=NO_RETRY)
    files = [] if job.result is None else job.result["files"]
    name = files[0] if variant == "video" else next((file for file in files if f".{variant}." in file), None)
    file = None if name is None else service.jobs.find_file(job, name)
    if file is None or not file.is_file():  # expired since the job was read
        raise ApiError(404, "video_not_found", f"the {variant} of {job.id} has expired")
    return FileResponse(file, media_type=find_media_type(file), headers=FILE_HEADERS)


@router.delete("/{video_id}", response_model=None, summary="Delete a finished video")
async def delete(video_id: _VideoId, request: Request, service: ServiceOf) -> Response:
    """Delete a video that has ended."""
    job = await _find(service, request, video_id)
    try:
        await run_in_threadpool(service.jobs.delete, job.id)
    except UsageError as error:
        raise ApiError(409, "job_not_ended", f"{error.message}; {error.hint}", headers=NO_RETRY) from error
    return JSONResponse({"id": job.id, "object": "video.deleted", "deleted": True})


class RemixRequest(BaseModel):
    """Body of a remix."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: Annotated[str, Field(min_length=1, description="Prompt that replaces the one of the video.")]
    user: Annotated[str | None, Field(max_length=256)] = None


@router.post("/{video_id}/remix", summary="Submit a finished video with another prompt")
async def remix(video_id: _VideoId, body: RemixRequest, request: Request, service: ServiceOf) -> dict[str, Any]:
    """Add a video with the seed and settings of another one and a new prompt to the queue."""
    job = await _find(service, request, video_id)
    if job.state != "done":
        message = f"only a completed video can be remixed, and {job.id} is {job.state}"
        raise ApiError(409, "video_not_ready", message, headers=NO_RETRY)
    service.check_ready()
    check_text("prompt", body.prompt, service.settings.limits)
    spec = dataclasses.replace(read_job_spec(job.request), prompt=body.prompt, remixed_from=job.id)
    if spec.model not in service.models:
        raise ApiError(404, "model_not_found", f"the model {spec.model[:80]!r} is no longer served", param="model")
    inputs = await run_in_threadpool(service.read_kept_inputs, job)
    return await service.describe_video(await service.accept(request, spec, body, inputs))


async def begin_video_job(
    service: Service, request: Request, body: VideoRequest, inputs: dict[str, list[bytes]], *, from_form: bool = False
) -> Job:
    """Validate a request for a video, store it as a job and return the job."""
    service.check_ready()
    limits = service.settings.limits
    size = await check_images(inputs, limits)
    task: Task = "edit" if inputs else "generate"
    spec = make_video_spec(body, task, service.models, limits, size, from_form=from_form)
    check_input_files(inputs, service.models[spec.model], task)
    return await service.accept(request, spec, body, inputs)


async def _read_request(request: Request, service: Service) -> tuple[Form, bool]:
    """Return the fields and files of a request, and whether it is a form."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        return await read_form(request, FILE_FIELDS, service.settings.limits), True
    try:
        fields = json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise ApiError(400, "invalid_json", "the request body is not valid JSON") from error
    if not isinstance(fields, dict):
        raise ApiError(400, "invalid_value", "the request body must be a JSON object")
    return Form(fields), False


def _read_json(fields: dict[str, Any]) -> VideoRequest:
    try:
        return VideoRequest.model_validate(fields)
    except ValidationError as error:
        raise describe_invalid(error) from error


def _pop_reference(form: Form) -> bytes | None:
    """Remove the input image from the fields of a request and return its content, or None if there is none."""
    # As JSON, the reference is an object. In a form, it is a file, or its members are separate fields.
    value = form.fields.pop("input_reference", None)
    reference = dict(value) if isinstance(value, dict) else {} if value is None else {"image_url": value}
    for name in [name for name in form.fields if name.startswith("input_reference[")]:
        reference[name.removeprefix("input_reference[").removesuffix("]")] = form.fields.pop(name)
    if not reference:
        return None
    if "file_id" in reference:
        message = "this service stores no files: pass the image as a file or as a data URL in image_url, not file_id"
        raise ApiError(400, "unsupported_parameter", message, param="input_reference")
    url = reference.pop("image_url", None)
    if not isinstance(url, str) or reference:
        message = "input_reference must be a file, or an object with image_url"
        raise ApiError(400, "invalid_value", message, param="input_reference")
    if form.inputs:
        raise ApiError(400, "too_many_images", "input_reference is given twice", param="input_reference")
    return decode_data_url(url, "input_reference")


async def _find(service: Service, request: Request, video_id: str) -> Job:
    job = await service.find(request, video_id)
    if job.request.get("kind") != "video":
        raise ApiError(404, "video_not_found", f"{job.id} is not a video; see GET /v1/jobs/{job.id}")
    return job


def _describe_end(job: Job) -> ApiError:
    if job.state == "cancelled":
        return ApiError(409, "cancelled", "the video was cancelled", headers=NO_RETRY)
    return describe_failure(job.error)
