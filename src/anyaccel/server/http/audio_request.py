"""Schemas for audio requests, and the function that validates a request and converts it to a job spec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from anyaccel.server.http.errors import ApiError
from anyaccel.server.http.generation_request import GenerationRequest, choose_seed, find_model, read_common_values
from anyaccel.server.settings import ServerLimits
from anyaccel.server.worker.job_spec import JobSpec, Task
from anyaccel.server.worker.messages import ModelFacts

__all__ = ["AudioRequest", "SpeechRequest", "make_audio_spec"]


class AudioRequest(GenerationRequest):
    """Fields of a job for audio."""

    seconds: Annotated[float | None, Field(gt=0, allow_inf_nan=False, description="Length in seconds.")] = None
    output_format: Literal["wav", "flac"] | None = None


class SpeechRequest(BaseModel):
    """Body of a `/v1/audio/speech` request: OpenAI's fields plus arguments of diffusers pipelines."""

    model_config = ConfigDict(extra="allow", strict=True)

    input: Annotated[str, Field(min_length=1, description="Description of the audio.")]
    model: Annotated[str | None, Field(description="A model of `/v1/models`; default: the first one for audio.")] = None
    voice: Annotated[str | dict[str, str] | None, Field(description="Accepted and ignored.")] = None
    instructions: Annotated[str | None, Field(description="Accepted and ignored.")] = None
    response_format: Annotated[str | None, Field(max_length=20, description="`wav` (default) or `flac`.")] = None
    speed: Annotated[float | None, Field(description="Only 1.")] = None
    stream_format: Annotated[Literal["audio"] | None, Field(description="Only `audio`.")] = None


def make_audio_spec(
    request: AudioRequest, task: Task, models: Mapping[str, ModelFacts], limits: ServerLimits
) -> JobSpec:
    """Convert a request to a job spec.

    Raises `ApiError` if the model does not support the request or the request exceeds a limit.
    """
    facts = find_model(request, models, "audio")
    assert facts.audio is not None
    values = read_common_values(request, facts, task, limits, from_form=False)
    if request.size is not None:
        raise ApiError(400, "unsupported_parameter", "audio has no size", param="size")
    if request.seconds is not None and not facts.audio.sets_seconds:
        message = f"{facts.name} does not support a length in seconds"
        raise ApiError(400, "unsupported_parameter", message, param="seconds")
    seconds = facts.audio.seconds if request.seconds is None else request.seconds
    if seconds is not None and seconds > limits.max_audio_s:
        message = f"audio can be at most {limits.max_audio_s:g} seconds long, not {seconds:g}"
        raise ApiError(400, "too_long", message, param="seconds")
    return JobSpec(
        seeds=(choose_seed(request),), seconds=seconds, output_format=request.output_format or "wav", **values
    )
