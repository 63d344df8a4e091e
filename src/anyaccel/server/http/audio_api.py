"""Audio endpoint in the form of OpenAI's speech endpoint."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool

from anyaccel.server.http.audio_request import AudioRequest, SpeechRequest, make_audio_spec
from anyaccel.server.http.errors import ApiError, describe_invalid
from anyaccel.server.http.images_api import check_done
from anyaccel.server.http.input_files import check_input_files
from anyaccel.server.http.responses import FILE_HEADERS, find_media_type
from anyaccel.server.http.service import ClientGoneError, Service, ServiceOf
from anyaccel.server.jobs.store import Job

__all__ = ["begin_audio_job", "router"]

_FORMATS = ("wav", "flac")
_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "The audio file", "content": {"audio/wav": {}, "audio/flac": {}}},
    **{
        status: {"description": description}
        for status, description in {
            202: "The job, if the request has `Prefer: respond-async`",
            400: "Invalid request",
            401: "Invalid API key",
            404: "Unknown model",
            408: "The client sent the request too slowly",
            409: "The Idempotency-Key was used for a different request, or the job was cancelled",
            413: "The request is too large",
            429: "The queue is full",
            500: "Audio generation failed",
            503: "The service is not ready",
            504: "The deadline passed before the audio was finished",
        }.items()
    },
}
router = APIRouter(prefix="/v1/audio")


@router.post("/speech", response_model=None, summary="Generate audio from a description", responses=_RESPONSES)
async def generate(body: SpeechRequest, request: Request, service: ServiceOf) -> Response:
    """Generate audio from a description and return its file."""
    job = await begin_audio_job(service, request, _read_speech(body))
    headers = {"anyaccel-job": job.id}
    if "respond-async" in request.headers.get("prefer", ""):
        return JSONResponse(await service.describe(job), 202, {**headers, "preference-applied": "respond-async"})
    try:
        ended_job = await service.wait(request, job)
    except ClientGoneError:
        if "idempotency-key" not in request.headers:
            await run_in_threadpool(service.dispatcher.cancel, job.id)
        return Response(status_code=499)
    check_done(ended_job)
    file = service.jobs.find_file(ended_job, (ended_job.result or {})["files"][0])
    if file is None or not file.is_file():
        raise ApiError(404, "job_not_found", f"the audio of {job.id} has expired")
    return FileResponse(file, media_type=find_media_type(file), headers={**FILE_HEADERS, **headers})


@router.post("/transcriptions", include_in_schema=False)
@router.post("/translations", include_in_schema=False)
async def reject_unsupported(request: Request) -> Response:
    """Reject the routes of OpenAI's API that diffusers pipelines do not support."""
    raise ApiError(501, "not_supported", f"{request.url.path} is not supported by this service")


async def begin_audio_job(
    service: Service, request: Request, body: AudioRequest, inputs: dict[str, list[bytes]] | None = None
) -> Job:
    """Validate a request for audio, store it as a job and return the job."""
    service.check_ready()
    models = service.models
    spec = make_audio_spec(body, "generate", models, service.settings.limits)
    check_input_files(inputs or {}, models[spec.model], "generate")
    return await service.accept(request, spec, body, inputs or {})


def _read_speech(body: SpeechRequest) -> AudioRequest:
    if body.response_format is not None and body.response_format not in _FORMATS:
        message = f"response_format must be wav or flac, not {body.response_format!r:.40}"
        raise ApiError(400, "invalid_value", message, param="response_format")
    if body.speed not in (None, 1):
        raise ApiError(400, "unsupported_parameter", "speed must be 1; pass seconds instead", param="speed")
    values = {
        "prompt": body.input,
        "model": body.model,
        "output_format": body.response_format,
        **(body.model_extra or {}),
    }
    try:
        return AudioRequest.model_validate({name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        raise describe_invalid(error) from error
