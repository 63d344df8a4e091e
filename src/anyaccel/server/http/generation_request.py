"""Fields and checks that the requests for images, videos and audio have in common."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from anyaccel.call_limits import LARGEST_SEED, parse_image_size
from anyaccel.errors import UsageError, nearest
from anyaccel.media.types import Kind
from anyaccel.server.http.errors import ApiError, describe_invalid
from anyaccel.server.http.pipeline_arguments import check_arguments
from anyaccel.server.settings import ServerLimits
from anyaccel.server.worker.job_spec import Task
from anyaccel.server.worker.messages import ModelFacts

__all__ = [
    "GenerationRequest",
    "check_text",
    "choose_seed",
    "find_model",
    "find_size",
    "read_common_values",
    "read_form_fields",
]

# A random seed of 32 bits is exact in JavaScript, unlike one of 64 bits.
_SEED_BITS = 32
_ENDPOINTS = {"image": "/v1/images/generations", "video": "/v1/videos", "audio": "/v1/audio/speech"}
_QUALITY_SPEEDS = {"low": "draft", "medium": "fast"}
# From the most accurate to the fastest.
_SPEEDS = ("exact", "fast", "draft")


class GenerationRequest(BaseModel):
    """Fields of every request that generates something. Unknown fields are arguments of the pipeline."""

    model_config = ConfigDict(extra="allow", strict=True)

    prompt: Annotated[str, Field(min_length=1, description="Description of the result.")]
    model: Annotated[str | None, Field(description="A model of `/v1/models`; default: the first one.")] = None
    size: Annotated[str | None, Field(max_length=20, description="`WIDTHxHEIGHT`, or `auto`.")] = None
    user: Annotated[
        str | None, Field(max_length=256, description="End user; queued requests of different users take turns.")
    ] = None
    quality: Annotated[
        str | None,
        Field(max_length=20, description="`medium` and `low` are faster if the service was started with these levels."),
    ] = None
    seed: Annotated[
        int | None, Field(ge=0, le=LARGEST_SEED, description="Seed of the first result; default: random.")
    ] = None
    negative_prompt: str | None = None
    num_inference_steps: Annotated[int | None, Field(ge=1)] = None
    guidance_scale: Annotated[float | None, Field(ge=0, le=1000, allow_inf_nan=False)] = None
    lora: Annotated[str | None, Field(max_length=200, description="Name of a served LoRA.")] = None
    lora_scale: Annotated[float | None, Field(ge=-10, le=10, allow_inf_nan=False)] = None


_Request = TypeVar("_Request", bound=GenerationRequest)


def read_form_fields(kind: type[_Request], fields: Mapping[str, Any]) -> _Request:
    """Return the request in the fields of a form, whose values are texts, or lists of texts for `sigmas[]`.

    Raises `ApiError` if a field is invalid.
    """
    lists = {name: value for name, value in fields.items() if isinstance(value, list)}
    for name in lists:
        if name in kind.model_fields:
            raise ApiError(400, "invalid_value", f"{name[:60]} must not be a list", param=name[:60])
    try:
        # Form values are strings, which the model's strict mode would reject.
        request = kind.model_validate_strings({name: value for name, value in fields.items() if name not in lists})
    except ValidationError as error:
        raise describe_invalid(error) from error
    return request.model_copy(update=lists)


def find_model(request: GenerationRequest, models: Mapping[str, ModelFacts], kind: Kind) -> ModelFacts:
    """Return the requested model, or the first one that generates this kind of media."""
    if request.model is None:
        first = next((facts for facts in models.values() if facts.kind == kind), None)
        if first is not None:
            return first
        raise ApiError(400, "unsupported_task", f"no model of this service generates {kind}s", param="model")
    facts = models.get(request.model)
    if facts is None:
        message = f"unknown model {request.model[:80]!r}: {nearest(request.model, models)}"
        raise ApiError(404, "model_not_found", message, param="model")
    if facts.kind != kind:
        message = f"{facts.name} generates {facts.kind}s; send the request to {_ENDPOINTS[facts.kind]} or to /v1/jobs"
        raise ApiError(400, "unsupported_task", message, param="model")
    return facts


def read_common_values(
    request: GenerationRequest, facts: ModelFacts, task: Task, limits: ServerLimits, *, from_form: bool
) -> dict[str, Any]:
    """Return the values of a job spec that do not depend on the kind of media.

    Raises `ApiError` if the model does not support one or it exceeds a limit.
    """
    if task not in facts.tasks:
        message = f"{facts.name} does not support the task {task!r}; supported tasks: {', '.join(facts.tasks)}"
        raise ApiError(400, "unsupported_task", message, param="model")
    _check_limits(request, limits)
    names = ("negative_prompt", "num_inference_steps", "guidance_scale", "strength")
    values: dict[str, Any] = {name: getattr(request, name, None) for name in names}
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
    known = tuple(type(request).model_fields)
    extra = request.model_extra or {}
    arguments = check_arguments(extra, facts, task, limits, from_form=from_form, known=known)
    if request.lora is not None and request.lora not in facts.loras:
        hint = nearest(request.lora, facts.loras) if facts.loras else "this service provides no LoRA"
        raise ApiError(400, "unknown_lora", f"unknown LoRA {request.lora[:60]!r}: {hint}", param="lora")
    return {
        "task": task,
        "kind": facts.kind,
        "model": facts.name,
        "prompt": request.prompt,
        "lora": request.lora,
        "lora_scale": 1.0 if request.lora_scale is None else request.lora_scale,
        "arguments": arguments,
        "speed": _choose_speed(request.quality, facts),
        **values,
    }


def choose_seed(request: GenerationRequest) -> int:
    """Return the requested seed, or a random one."""
    return secrets.randbits(_SEED_BITS) if request.seed is None else request.seed


def _choose_speed(quality: str | None, facts: ModelFacts) -> str | None:
    """Return the speed level for a quality: the fastest one that is served and not faster than the quality allows.

    Returns None if the service has only one level; the quality is then ignored.
    """
    if len(facts.speeds) < 2:
        return None
    if quality is None:
        return facts.speeds[0]
    allowed = _SPEEDS[: _SPEEDS.index(_QUALITY_SPEEDS.get(quality, "exact")) + 1]
    return next((speed for speed in reversed(allowed) if speed in facts.speeds), facts.speeds[0])


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
    minimum = math.ceil(1 / max(strength, 1e-6))  # of the smallest numbers, the reciprocal is infinite
    message = f"no denoising step would run with {steps} steps and strength {strength:g}; use at least {minimum} steps"
    raise ApiError(400, "invalid_value", message, param="strength")


def _check_limits(request: GenerationRequest, limits: ServerLimits) -> None:
    for name in ("prompt", "negative_prompt"):
        text = getattr(request, name)
        if text is not None:
            check_text(name, text, limits)
    for name, limit in (("n", limits.max_n), ("num_inference_steps", limits.max_steps)):
        value = getattr(request, name, None)
        if value is not None and value > limit:
            raise ApiError(400, "too_large", f"{name} must be at most {limit}, not {value}", param=name)


def check_text(name: str, text: str, limits: ServerLimits) -> None:
    """Raise `ApiError` if a text is too long or not valid Unicode."""
    if len(text) > limits.max_prompt:
        message = f"{name} has {len(text)} characters; the limit is {limits.max_prompt}"
        raise ApiError(400, "string_too_long", message, param=name)
    # JSON can encode lone surrogates, which tokenizers and PNG metadata reject.
    if not text.isprintable() and not text.encode("utf-8", "ignore").decode() == text:
        raise ApiError(400, "invalid_value", f"{name} is not valid Unicode", param=name)


def find_size(
    request: GenerationRequest, facts: ModelFacts, limits: ServerLimits, image_size: tuple[int, int] | None
) -> tuple[int, int]:
    """Return the requested size, or else the input image's size, or else the model's default.

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
