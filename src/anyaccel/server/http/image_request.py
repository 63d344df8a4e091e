"""A request for pictures: its fields, and what is checked before it becomes a job."""

from __future__ import annotations

import io
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from PIL import Image, ImageOps, UnidentifiedImageError
from pydantic import BaseModel, ConfigDict, Field

from anyaccel.call_limits import LARGEST_SEED, parse_image_size, read_seeds
from anyaccel.errors import UsageError, nearest
from anyaccel.server.http.errors import ApiError
from anyaccel.server.settings import ServerLimits
from anyaccel.server.worker.job_spec import JobSpec, Task
from anyaccel.server.worker.messages import ModelFacts

__all__ = ["EditRequest", "ImageRequest", "check_picture", "describe_form", "make_job_spec"]

_RANDOM_BITS = 32
_USUAL_STRENGTH = 0.8
"""What diffusers' pipelines take where none is given."""
_FORMATS = ("PNG", "JPEG", "WEBP")


class ImageRequest(BaseModel):
    """What `/v1/images/generations` takes: OpenAI's fields, and those of diffusers under their own names."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: Annotated[str, Field(min_length=1, description="What the picture shows.")]
    model: Annotated[str | None, Field(description="One of `/v1/models`; else the first.")] = None
    n: Annotated[int | None, Field(ge=1, description="Pictures; the seed goes up by one.")] = None
    size: Annotated[str | None, Field(max_length=20, description="`WIDTHxHEIGHT`, or `auto`.")] = None
    response_format: Literal["b64_json", "url"] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: Annotated[int | None, Field(ge=0, le=100, description="Quality of jpeg and webp.")] = None
    stream: Annotated[bool | None, Field(description="Send previews and the picture as events.")] = None
    partial_images: Annotated[int | None, Field(ge=0, le=3, description="Previews of each picture.")] = None
    user: Annotated[str | None, Field(max_length=256, description="Whose turn it is in the queue.")] = None
    quality: Annotated[str | None, Field(max_length=20, description="Taken, and of no effect.")] = None
    style: Annotated[str | None, Field(max_length=20, description="Taken, and of no effect.")] = None
    moderation: Annotated[str | None, Field(max_length=20, description="Taken, and of no effect.")] = None
    background: Literal["auto", "opaque"] | None = None
    seed: Annotated[int | None, Field(ge=0, le=LARGEST_SEED, description="One seed, one picture.")] = None
    negative_prompt: str | None = None
    num_inference_steps: Annotated[int | None, Field(ge=1)] = None
    guidance_scale: Annotated[float | None, Field(ge=0, le=1000, allow_inf_nan=False)] = None
    lora: Annotated[str | None, Field(max_length=200, description="An adapter that is served.")] = None
    lora_scale: Annotated[float | None, Field(ge=-10, le=10, allow_inf_nan=False)] = None


class EditRequest(ImageRequest):
    """What `/v1/images/edits` takes besides its pictures."""

    strength: Annotated[float | None, Field(gt=0, le=1, allow_inf_nan=False)] = None
    input_fidelity: Annotated[str | None, Field(max_length=20, description="Taken, and of no effect.")] = None


def check_picture(content: bytes, name: str, limits: ServerLimits) -> tuple[int, int]:
    """The size of a picture that was sent; raises if it is none, or larger than it may be, before it is unpacked."""
    try:
        with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
            width, height = image.size
            if width * height > limits.max_pixels:
                raise Image.DecompressionBombError
            image.load()
            width, height = ImageOps.exif_transpose(image).size
    except Image.DecompressionBombError as error:
        words = f"{name} has more than {limits.max_pixels} pixels"
        raise ApiError(400, "image_too_large", words, param=name) from error
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError) as error:
        raise ApiError(400, "invalid_image", f"{name} is no whole picture in png, jpeg or webp", param=name) from error
    return width, height


def make_job_spec(
    request: ImageRequest,
    task: Task,
    models: Mapping[str, ModelFacts],
    limits: ServerLimits,
    picture_size: tuple[int, int] | None = None,
) -> JobSpec:
    """The work that a request asks for; raises if it asks for what is not there, or for too much."""
    facts = _find_model(request, models)
    if task not in facts.tasks:
        raise ApiError(400, "unsupported_task", f"{facts.name} has no pipeline to {task}", param="model")
    _check_limits(request, limits)
    width, height = _find_size(request, facts, limits, picture_size)
    wanted: dict[str, Any] = {
        "negative_prompt": request.negative_prompt,
        "num_inference_steps": request.num_inference_steps,
        "guidance_scale": request.guidance_scale,
        "strength": getattr(request, "strength", None),
    }
    for name, value in wanted.items():
        if value is not None and name not in facts.takes[task]:
            raise ApiError(400, "unsupported_parameter", f"{facts.name} takes no {name}", param=name)
    for name, value in (("num_inference_steps", facts.steps), ("guidance_scale", facts.guidance)):
        if wanted[name] is None and name in facts.takes[task]:
            wanted[name] = value  # the recipe says what was taken, also when the model's own changes
    _check_strength(wanted, facts.takes[task])
    if request.lora is not None and request.lora not in facts.loras:
        hint = nearest(request.lora, facts.loras) if facts.loras else "none is served"
        raise ApiError(400, "unknown_lora", f"there is no LoRA {request.lora[:60]!r}: {hint}", param="lora")
    first = secrets.randbits(_RANDOM_BITS) if request.seed is None else request.seed
    return JobSpec(
        task=task,
        model=facts.name,
        prompt=request.prompt,
        seeds=read_seeds(first, request.n or 1),
        width=width,
        height=height,
        lora=request.lora,
        lora_scale=1.0 if request.lora_scale is None else request.lora_scale,
        partial_images=request.partial_images or 0,
        output_format=request.output_format or "png",
        output_compression=95 if request.output_compression is None else request.output_compression,
        **wanted,
    )


def _check_strength(wanted: dict[str, Any], takes: Sequence[str]) -> None:
    """An edit takes the share of its steps that strength says, and at least one."""
    steps, strength = wanted["num_inference_steps"], wanted["strength"]
    if "strength" not in takes or steps is None:
        return
    if strength is None and steps * _USUAL_STRENGTH < 1:
        wanted["strength"] = 1.0
    elif strength is not None and steps * strength < 1:
        words = f"{steps} steps at a strength of {strength} are none: take at least {math.ceil(1 / strength)} steps"
        raise ApiError(400, "invalid_value", words, param="strength")


def _find_model(request: ImageRequest, models: Mapping[str, ModelFacts]) -> ModelFacts:
    if request.model is None:
        return next(iter(models.values()))
    found = models.get(request.model)
    if found is None:
        words = f"there is no model {request.model[:80]!r} here: {nearest(request.model, models)}"
        raise ApiError(404, "model_not_found", words, param="model")
    return found


def _check_limits(request: ImageRequest, limits: ServerLimits) -> None:
    for name in ("prompt", "negative_prompt"):
        text = getattr(request, name)
        if text is None:
            continue
        if len(text) > limits.max_prompt:
            words = f"{name} has {len(text)} characters, and {limits.max_prompt} are taken"
            raise ApiError(400, "string_too_long", words, param=name)
        if not text.isprintable() and not text.encode("utf-8", "ignore").decode() == text:
            raise ApiError(400, "invalid_value", f"{name} is no text in Unicode", param=name)
    for name, most in (("n", limits.max_n), ("num_inference_steps", limits.max_steps)):
        value = getattr(request, name)
        if value is not None and value > most:
            raise ApiError(400, "too_large", f"{name} is at most {most}, not {value}", param=name)


def _find_size(
    request: ImageRequest, facts: ModelFacts, limits: ServerLimits, picture_size: tuple[int, int] | None
) -> tuple[int, int]:
    """The size that is asked for; else that of the picture that came along, else the model's own."""
    if request.size in (None, "auto"):
        if picture_size is None or facts.fixed_sizes:
            return facts.sizes[0]
        width, height = (max(facts.multiple, side // facts.multiple * facts.multiple) for side in picture_size)
    else:
        try:
            width, height = parse_image_size(request.size or "")
        except UsageError as error:
            raise ApiError(400, "invalid_size", f"{error.message}: {error.hint}", param="size") from error
    if width * height > limits.max_pixels:
        most = math.isqrt(limits.max_pixels)
        words = f"{width}x{height} has more than {limits.max_pixels} pixels, such as {most}x{most}"
        raise ApiError(400, "invalid_size", words, param="size")
    if width % facts.multiple or height % facts.multiple:
        words = f"sides are multiples of {facts.multiple} for {facts.name}, not {width}x{height}"
        raise ApiError(400, "invalid_size", words, param="size")
    if facts.fixed_sizes and (width, height) not in facts.sizes:
        ready = ", ".join(f"{one[0]}x{one[1]}" for one in facts.sizes)
        raise ApiError(400, "invalid_size", f"{width}x{height} is not ready on {facts.device}: {ready}", param="size")
    return width, height


def describe_form() -> dict[str, Any]:
    """The fields of an edit, for the description of the API."""
    schema = EditRequest.model_json_schema()
    properties = {
        **schema["properties"],
        "image": {"type": "string", "format": "binary", "description": "The picture to begin with."},
        "mask": {"type": "string", "format": "binary", "description": "White where it is to change."},
    }
    form = {"type": "object", "properties": properties, "required": ["prompt", "image"]}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": form}}}}
