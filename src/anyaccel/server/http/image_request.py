"""Schemas for image requests, and the function that validates a request and converts it to a job spec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from anyaccel.call_limits import read_seeds
from anyaccel.server.http.generation_request import (
    GenerationRequest,
    choose_seed,
    find_model,
    find_size,
    read_common_values,
)
from anyaccel.server.settings import ServerLimits
from anyaccel.server.worker.job_spec import JobSpec, Task
from anyaccel.server.worker.messages import ModelFacts

__all__ = ["FILE_FIELDS", "EditRequest", "ImageRequest", "describe_form", "make_job_spec"]

FILE_FIELDS = {
    "image": "image",
    "mask": "mask_image",
    "control_image": "control_image",
    "ip_adapter_image": "ip_adapter_image",
}
"""Input of a job for each form field with files. OpenAI's clients send a list of images as `image[]`."""
_FILE_DESCRIPTIONS = {
    "image": "Images to edit; several for models that take reference images.",
    "mask": "Mask: white, or transparent, where the image changes.",
    "control_image": "Image for the ControlNet of the model.",
    "ip_adapter_image": "Images for the IP-Adapter of the model.",
}


class ImageRequest(GenerationRequest):
    """Body of a `/v1/images/generations` request: OpenAI's fields plus arguments of diffusers pipelines."""

    n: Annotated[int | None, Field(ge=1, description="Number of images; each has the next seed.")] = None
    response_format: Literal["b64_json", "url"] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: Annotated[int | None, Field(ge=0, le=100, description="Quality of JPEG and WebP.")] = None
    stream: Annotated[bool | None, Field(description="Send previews and images as events.")] = None
    partial_images: Annotated[int | None, Field(ge=0, le=3, description="Number of previews per image.")] = None
    style: Annotated[str | None, Field(max_length=20, description="Accepted and ignored.")] = None
    moderation: Annotated[str | None, Field(max_length=20, description="Accepted and ignored.")] = None
    background: Literal["auto", "opaque"] | None = None


class EditRequest(ImageRequest):
    """Form fields of a `/v1/images/edits` request, excluding the uploaded files."""

    strength: Annotated[float | None, Field(gt=0, le=1, allow_inf_nan=False)] = None
    input_fidelity: Annotated[str | None, Field(max_length=20, description="Accepted and ignored.")] = None


def make_job_spec(
    request: ImageRequest,
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
    facts = find_model(request, models, "image")
    values = read_common_values(request, facts, task, limits, from_form=from_form)
    width, height = find_size(request, facts, limits, image_size)
    return JobSpec(
        seeds=read_seeds(choose_seed(request), request.n or 1),
        width=width,
        height=height,
        partial_images=request.partial_images or 0,
        output_format=request.output_format or "png",
        output_compression=95 if request.output_compression is None else request.output_compression,
        **values,
    )


def describe_form() -> dict[str, Any]:
    """Return the OpenAPI description of the form for image edits.

    FastAPI cannot derive it, because the endpoint reads the form itself.
    """
    files = {
        name: {"type": "string", "format": "binary", "description": text} for name, text in _FILE_DESCRIPTIONS.items()
    }
    properties = {**EditRequest.model_json_schema()["properties"], **files}
    form = {"type": "object", "properties": properties, "required": ["prompt", "image"]}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": form}}}}
