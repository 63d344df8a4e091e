"""Schema for video requests, and the function that validates a request and converts it to a job spec."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from anyaccel.errors import UsageError
from anyaccel.media.formats import check_frame_rate
from anyaccel.server.http.errors import ApiError
from anyaccel.server.http.generation_request import (
    GenerationRequest,
    choose_seed,
    find_model,
    find_size,
    read_common_values,
)
from anyaccel.server.settings import ServerLimits
from anyaccel.server.worker.job_spec import SUFFIXES, JobSpec, Task
from anyaccel.server.worker.messages import ModelFacts, VideoFacts

__all__ = ["FILE_FIELDS", "VideoRequest", "describe_form", "make_video_spec"]

FILE_FIELDS = {"input_reference": "image"}
"""Input of a job for each form field with files."""


class VideoRequest(GenerationRequest):
    """Fields of a `/v1/videos` request: OpenAI's fields plus arguments of diffusers pipelines."""

    seconds: Annotated[
        str | int | float | None, Field(description="Length of the video in seconds; OpenAI's clients send a string.")
    ] = None
    num_frames: Annotated[int | None, Field(ge=1, description="Length of the video in frames.")] = None
    fps: Annotated[float | None, Field(gt=0, le=240, allow_inf_nan=False, description="Frames per second.")] = None
    output_format: Literal["mp4", "webm", "webp", "gif"] | None = None
    output_compression: Annotated[int | None, Field(ge=0, le=100, description="Quality of animated WebP.")] = None
    input_reference: Annotated[
        dict[str, str] | None,
        Field(description="Image from which the video starts: `image_url` with a data URL. Forms: a file."),
    ] = None


def make_video_spec(
    request: VideoRequest,
    task: Task,
    models: Mapping[str, ModelFacts],
    limits: ServerLimits,
    image_size: tuple[int, int] | None = None,
    *,
    from_form: bool = False,
) -> JobSpec:
    """Convert a request to a job spec; `from_form` tells that unknown fields are texts.

    Raises `ApiError` if the model does not support the request or the request exceeds a limit.
    """
    facts = find_model(request, models, "video")
    assert facts.video is not None
    values = read_common_values(request, facts, task, limits, from_form=from_form)
    # Not the size of the input image: photos are much larger than videos.
    width, height = find_size(request, facts, limits, None)
    frames, fps = _choose_length(request, facts.video)
    output_format = request.output_format or "mp4"
    try:
        check_frame_rate(SUFFIXES[output_format], fps)
    except UsageError as error:
        param = "fps" if request.seconds is None or request.fps is not None else "seconds"
        raise ApiError(400, "invalid_value", f"{error.message}; {error.hint}", param=param) from error
    _check_length(width, height, frames, limits)
    return JobSpec(
        seeds=(choose_seed(request),),
        width=width,
        height=height,
        num_frames=frames,
        fps=fps,
        seconds=frames / fps,
        output_format=output_format,
        output_compression=95 if request.output_compression is None else request.output_compression,
        **values,
    )


def _choose_length(request: VideoRequest, facts: VideoFacts) -> tuple[int, float]:
    """Return the number of frames and the frame rate."""
    fps = request.fps or facts.fps
    if facts.frame_limits is None:
        return _count_frames(request, facts, fps), fps
    if request.seconds is not None and request.num_frames is None and request.fps is None:
        return facts.frames, facts.frames / _read_seconds(request.seconds)
    frames = _count_frames(request, facts, fps)
    fewest, most = facts.frame_limits
    if not fewest <= frames <= most:
        param = "num_frames" if request.seconds is None else "seconds"
        message = f"the model generates {fewest} to {most} frames, not {frames}; use seconds or fps, not both"
        raise ApiError(400, "invalid_value", message, param=param)
    return frames, fps


def _count_frames(request: VideoRequest, facts: VideoFacts, fps: float) -> int:
    """Return the number of frames, rounded to the nearest one that the model supports."""
    if request.num_frames is not None and request.seconds is not None:
        raise ApiError(400, "invalid_value", "pass either seconds or num_frames, not both", param="num_frames")
    if request.num_frames is None and request.seconds is None:
        return facts.frames
    if not facts.sets_frames:
        raise ApiError(400, "unsupported_parameter", "the model does not support other lengths", param="seconds")
    frames = request.num_frames
    if frames is None:
        frames = max(1, round(_read_seconds(request.seconds or 0) * fps))
    return max(facts.rest or facts.step, round((frames - facts.rest) / facts.step) * facts.step + facts.rest)


def _read_seconds(seconds: str | float) -> float:
    try:
        value = float(seconds)
    except ValueError:
        value = math.nan
    if not 0 < value < 1e6:
        message = f"seconds must be a positive number of seconds, not {seconds!r:.40}"
        raise ApiError(400, "invalid_value", message, param="seconds")
    return value


def _check_length(width: int, height: int, frames: int, limits: ServerLimits) -> None:
    if frames > limits.max_frames:
        message = f"a video can have at most {limits.max_frames} frames, not {frames}; use fewer seconds or a lower fps"
        raise ApiError(400, "too_long", message, param="seconds")
    if width * height * frames > limits.max_video_pixels:
        message = (
            f"{frames} frames of {width}x{height} exceed the limit of {limits.max_video_pixels} pixels in all frames; "
            f"use at most {limits.max_video_pixels // (width * height)} frames or a smaller size"
        )
        raise ApiError(400, "too_long", message, param="seconds")


def describe_form() -> dict[str, Any]:
    """Return the OpenAPI description of a video request, as a form or as JSON.

    FastAPI cannot derive it, because the endpoint reads the request itself.
    """
    schema = VideoRequest.model_json_schema()
    file = {"type": "string", "format": "binary", "description": "Image from which the video starts."}
    form = {**schema, "properties": {**schema["properties"], "input_reference": file}}
    content = {"multipart/form-data": {"schema": form}, "application/json": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}
