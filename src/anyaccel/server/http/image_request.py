"""Schemas for image requests, and functions that validate a request and convert it to a job spec."""

from __future__ import annotations

import io
import math
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from PIL import Image, ImageOps, UnidentifiedImageError
from pydantic import BaseModel, ConfigDict, Field

from anyaccel.call_limits import LARGEST_SEED, parse_image_size, read_seeds
from anyaccel.errors import UsageError, nearest
from anyaccel.server.http.errors import ApiError
from anyaccel.server.settings import ServerLimits
from anyaccel.server.worker.job_spec import JobSpec, Task
from anyaccel.server.worker.messages import ModelFacts

__all__ = ["EditRequest", "ImageRequest", "check_image", "describe_form", "make_job_spec"]

# A random seed of 32 bits is exact in JavaScript, unlike one of 64 bits.
_SEED_BITS = 32
_FORMATS = ("PNG", "JPEG", "WEBP")


class ImageRequest(BaseModel):
    """Body of a `/v1/images/generations` request: OpenAI's fields plus some diffusers arguments."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: Annotated[str, Field(min_length=1, description="Description of the image.")]
    model: Annotated[str | None, Field(description="A model of `/v1/models`; default: the first one.")] = None
    n: Annotated[int | None, Field(ge=1, description="Number of images; each has the next seed.")] = None
    size: Annotated[str | None, Field(max_length=20, description="`WIDTHxHEIGHT`, or `auto`.")] = None
    response_format: Literal["b64_json", "url"] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: Annotated[int | None, Field(ge=0, le=100, description="Quality of JPEG and WebP.")] = None
    stream: Annotated[bool | None, Field(description="Send previews and images as events.")] = None
    partial_images: Annotated[int | None, Field(ge=0, le=3, description="Number of previews per image.")] = None
    user: Annotated[
        str | None, Field(max_length=256, description="End user; queued requests of different users take turns.")
    ] = None
    quality: Annotated[str | None, Field(max_length=20, description="Accepted and ignored.")] = None
    style: Annotated[str | None, Field(max_length=20, description="Accepted and ignored.")] = None
    moderation: Annotated[str | None, Field(max_length=20, description="Accepted and ignored.")] = None
    background: Literal["auto", "opaque"] | None = None
    seed: Annotated[
        int | None, Field(ge=0, le=LARGEST_SEED, description="Seed of the first image; default: random.")
    ] = None
    negative_prompt: str | None = None
    num_inference_steps: Annotated[int | None, Field(ge=1)] = None
    guidance_scale: Annotated[float | None, Field(ge=0, le=1000, allow_inf_nan=False)] = None
    lora: Annotated[str | None, Field(max_length=200, description="Name of a served LoRA.")] = None
    lora_scale: Annotated[float | None, Field(ge=-10, le=10, allow_inf_nan=False)] = None


class EditRequest(ImageRequest):
    """Form fields of a `/v1/images/edits` request, excluding the uploaded files."""

    strength: Annotated[float | None, Field(gt=0, le=1, allow_inf_nan=False)] = None
    input_fidelity: Annotated[str | None, Field(max_length=20, description="Accepted and ignored.")] = None


def check_image(content: bytes, name: str, limits: ServerLimits) -> tuple[int, int]:
    """Validate an uploaded image and return its width and height.

    Raises `ApiError` if it is not a valid PNG, JPEG or WebP image or has too many pixels.
    """
    try:
        with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
            # From the header, before `load` decodes the pixels: a small file can contain a huge image.
            width, height = image.size
            if width * height > limits.max_pixels:
                raise Image.DecompressionBombError
            image.load()
            # The orientation may swap the sides, and the result has the size that the user sees.
            width, height = ImageOps.exif_transpose(image).size
    except Image.DecompressionBombError as error:
        message = f"{name} has more than {limits.max_pixels} pixels; send a smaller image"
        raise ApiError(400, "image_too_large", message, param=name) from error
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError) as error:
        raise ApiError(400, "invalid_image", f"{name} is not a valid PNG, JPEG or WebP image", param=name) from error
    return width, height


def make_job_spec(
    request: ImageRequest,
    task: Task,
    models: Mapping[str, ModelFacts],
    limits: ServerLimits,
    image_size: tuple[int, int] | None = None,
) -> JobSpec:
    """Convert a request to a job spec.

    Raises `ApiError` if the model does not support the request or the request exceeds a limit.
    """
    facts = _find_model(request, models)
    if task not in facts.tasks:
        message = f"{facts.name} does not support the task {task!r}; supported tasks: {', '.join(facts.tasks)}"
        raise ApiError(400, "unsupported_task", message, param="model")
    _check_limits(request, limits)
    width, height = _find_size(request, facts, limits, image_size)
    values: dict[str, Any] = {
        "negative_prompt": request.negative_prompt,
        "num_inference_steps": request.num_inference_steps,
        "guidance_scale": request.guidance_scale,
        "strength": getattr(request, "strength", None),
    }
    for name, value in values.items():
        if value is not None and name not in facts.parameters[task]:
            raise ApiError(
                400, "unsupported_parameter", f"{facts.name} does not support the parameter {name}", param=name
            )
    is_default_strength = values["strength"] is None
    for name, value in facts.defaults[task].items():
        if values[name] is None and name in facts.parameters[task]:
            values[name] = value  # recorded in the job, because the default depends on the model's version
    _check_strength(values, is_default=is_default_strength)
    if request.lora is not None and request.lora not in facts.loras:
        hint = nearest(request.lora, facts.loras) if facts.loras else "this service provides no LoRA"
        raise ApiError(400, "unknown_lora", f"unknown LoRA {request.lora[:60]!r}: {hint}", param="lora")
    seed = secrets.randbits(_SEED_BITS) if request.seed is None else request.seed
    return JobSpec(
        task=task,
        model=facts.name,
        prompt=request.prompt,
        seeds=read_seeds(seed, request.n or 1),
        width=width,
        height=height,
        lora=request.lora,
        lora_scale=1.0 if request.lora_scale is None else request.lora_scale,
        partial_images=request.partial_images or 0,
        output_format=request.output_format or "png",
        output_compression=95 if request.output_compression is None else request.output_compression,
        **values,
    )


def _check_strength(values: dict[str, Any], *, is_default: bool) -> None:
    """Raise `ApiError` if the requested strength leaves no denoising steps to run.

    If the pipeline's default leaves no steps, set the strength in `values` to 1.0.
    """
    # Pipelines run `int(steps * strength)` steps and crash at 0: https://github.com/huggingface/diffusers/issues/11092
    steps, strength = values["num_inference_steps"], values["strength"]
    if steps is None or strength is None or steps * strength >= 1:
        return
    if is_default:
        values["strength"] = 1.0
        return
    minimum = math.ceil(1 / strength)
    message = f"no denoising step would run with {steps} steps and strength {strength}; use at least {minimum} steps"
    raise ApiError(400, "invalid_value", message, param="strength")


def _find_model(request: ImageRequest, models: Mapping[str, ModelFacts]) -> ModelFacts:
    if request.model is None:
        return next(iter(models.values()))
    facts = models.get(request.model)
    if facts is None:
        message = f"unknown model {request.model[:80]!r}: {nearest(request.model, models)}"
        raise ApiError(404, "model_not_found", message, param="model")
    return facts


def _check_limits(request: ImageRequest, limits: ServerLimits) -> None:
    for name in ("prompt", "negative_prompt"):
        text = getattr(request, name)
        if text is None:
            continue
        if len(text) > limits.max_prompt:
            message = f"{name} has {len(text)} characters; the limit is {limits.max_prompt}"
            raise ApiError(400, "string_too_long", message, param=name)
        # JSON can encode lone surrogates, which tokenizers and PNG metadata reject.
        if not text.isprintable() and not text.encode("utf-8", "ignore").decode() == text:
            raise ApiError(400, "invalid_value", f"{name} is not valid Unicode", param=name)
    for name, limit in (("n", limits.max_n), ("num_inference_steps", limits.max_steps)):
        value = getattr(request, name)
        if value is not None and value > limit:
            raise ApiError(400, "too_large", f"{name} must be at most {limit}, not {value}", param=name)


def _find_size(
    request: ImageRequest, facts: ModelFacts, limits: ServerLimits, image_size: tuple[int, int] | None
) -> tuple[int, int]:
    """Return the requested image size, or else the input image's size, or else the model's default.

    The input image's size is rounded down to a multiple that the model supports. Raises `ApiError` if
    the size is invalid or exceeds the pixel limit.
    """
    if request.size in (None, "auto"):
        if image_size is None or facts.fixed_sizes:
            return facts.sizes[0]
        # The worker resizes the input image to this size.
        width, height = (max(facts.multiple, side // facts.multiple * facts.multiple) for side in image_size)
    else:
        try:
            width, height = parse_image_size(request.size or "")
        except UsageError as error:
            raise ApiError(400, "invalid_size", f"{error.message}: {error.hint}", param="size") from error
    if width * height > limits.max_pixels:
        side = math.isqrt(limits.max_pixels) // facts.multiple * facts.multiple
        message = f"{width}x{height} exceeds the limit of {limits.max_pixels} pixels; use at most {side}x{side}"
        raise ApiError(400, "invalid_size", message, param="size")
    if width % facts.multiple or height % facts.multiple:
        message = f"width and height must be multiples of {facts.multiple} for {facts.name}, not {width}x{height}"
        raise ApiError(400, "invalid_size", message, param="size")
    if facts.fixed_sizes and (width, height) not in facts.sizes:
        sizes = ", ".join(f"{compiled[0]}x{compiled[1]}" for compiled in facts.sizes)
        message = f"the size {width}x{height} is not available on {facts.device}; available sizes: {sizes}"
        raise ApiError(400, "invalid_size", message, param="size")
    return width, height


def describe_form() -> dict[str, Any]:
    """Return the OpenAPI description of the form for image edits.

    FastAPI cannot derive it, because the endpoint reads the form itself.
    """
    schema = EditRequest.model_json_schema()
    properties = {
        **schema["properties"],
        "image": {"type": "string", "format": "binary", "description": "Image to edit."},
        "mask": {
            "type": "string",
            "format": "binary",
            "description": "Mask: white, or transparent, where the image changes.",
        },
    }
    form = {"type": "object", "properties": properties, "required": ["prompt", "image"]}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": form}}}}
