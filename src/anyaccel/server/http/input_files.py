"""Files in requests: uploads in forms and data URLs, which are limited and checked before a job is stored."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from PIL import Image, ImageOps, UnidentifiedImageError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile

from anyaccel.errors import nearest
from anyaccel.server.http.errors import ApiError
from anyaccel.server.settings import ServerLimits
from anyaccel.server.worker.job_spec import Task
from anyaccel.server.worker.messages import ModelFacts

__all__ = ["Form", "check_image", "check_images", "check_input_files", "decode_data_url", "name_inputs", "read_form"]

_FORMATS = ("PNG", "JPEG", "WEBP")
_MAX_FIELDS = 80
_INPUTS = ("image", "mask_image", "control_image", "ip_adapter_image")


@dataclass
class Form:
    """Fields of a form and its uploaded files."""

    fields: dict[str, Any] = field(default_factory=dict)
    """Texts; a list for a field such as `sigmas[]`."""
    inputs: dict[str, list[bytes]] = field(default_factory=dict)
    """Contents of the files, by input of the job: `image`, `mask_image`."""


async def read_form(request: Request, file_fields: Mapping[str, str], limits: ServerLimits) -> Form:
    """Read a multipart form; `file_fields` maps the fields for files to the inputs of the job.

    Raises `ApiError` if the request is not a form, or has files in other fields or too many of them.
    """
    content_type = request.headers.get("content-type", "")
    if not content_type.startswith("multipart/form-data"):
        message = f"the Content-Type must be multipart/form-data, with files in the fields {_list(file_fields)}"
        raise ApiError(415, "unsupported_media_type", message)
    read = Form()
    form: FormData
    # A data URL is a field without a file name, whose size Starlette limits separately.
    async with request.form(
        max_files=limits.max_inputs + 2, max_fields=_MAX_FIELDS, max_part_size=limits.max_body
    ) as form:
        for name, value in form.multi_items():
            base = name.removesuffix("[]")
            if isinstance(value, UploadFile):
                if base not in file_fields:
                    message = f"unknown file field {name[:60]!r}; use {_list(file_fields)}"
                    raise ApiError(400, "unknown_parameter", message, param=name[:60])
                read.inputs.setdefault(file_fields[base], []).append(await value.read())
            elif base in file_fields:
                raise ApiError(400, "invalid_image", f"the field {name!r} must be a file upload", param=base)
            elif name.endswith("[]"):
                read.fields.setdefault(base, []).append(value)
            else:
                read.fields[name] = value
    return read


def decode_data_url(text: str, name: str) -> bytes:
    """Return the content of a data URL with base64 data; raise `ApiError` for any other URL.

    The service never fetches a URL: a client could reach servers that only this machine can reach.
    """
    head, separator, data = text.partition(",")
    if not head.startswith("data:"):
        message = f"{name} must be a data URL (data:image/png;base64,…); the service fetches no other URLs"
        raise ApiError(400, "unsupported_url", message, param=name)
    try:
        if not separator or not head.endswith(";base64"):
            raise ValueError
        return base64.b64decode(data, validate=True)
    except (ValueError, binascii.Error) as error:
        message = f"{name} is not a valid data URL: expected data:image/png;base64, and base64 data"
        raise ApiError(400, "invalid_image", message, param=name) from error


async def check_images(inputs: Mapping[str, list[bytes]], limits: ServerLimits) -> tuple[int, int] | None:
    """Validate the images of a request, and return the width and height of the first one of `image`, if any."""
    size = None
    for name in inputs:  # before an image is decoded
        if name not in _INPUTS:
            message = f"unknown input {name[:60]!r}: {nearest(name, _INPUTS)}"
            raise ApiError(400, "unknown_parameter", message, param="inputs")
    for name, contents in inputs.items():
        if len(contents) > (limits.max_inputs if name != "mask_image" else 1):
            limit = limits.max_inputs if name != "mask_image" else 1
            raise ApiError(400, "too_many_images", f"a request can have at most {limit} files as {name}", param=name)
        for content in contents:
            checked = await run_in_threadpool(check_image, content, name, limits)
            if name == "image" and size is None:
                size = checked
    return size


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


def check_input_files(inputs: Mapping[str, list[bytes]], facts: ModelFacts, task: Task) -> None:
    """Raise `ApiError` if the model does not accept one of the inputs."""
    accepted = facts.inputs.get(task, ())
    for name, contents in inputs.items():
        if name not in accepted:
            message = f"{facts.pipeline} does not accept the input {name}; it accepts {', '.join(accepted) or 'none'}"
            raise ApiError(400, "unsupported_parameter", message, param=name)
        if name == "image" and len(contents) > 1 and not facts.many_images:
            message = f"{facts.pipeline} accepts one image per request, not {len(contents)}"
            raise ApiError(400, "too_many_images", message, param=name)
    for name in facts.required_inputs.get(task, ()):
        if name not in inputs:
            message = f"{facts.pipeline} requires the input {name}"
            raise ApiError(400, "missing_required_parameter", message, param=name)


def name_inputs(inputs: Mapping[str, list[bytes]]) -> dict[str, bytes]:
    """Return the input files of a job by name: `image`, `image.1`, `image.2`, `mask_image`."""
    return {
        f"{name}.{index}" if index else name: content
        for name, contents in inputs.items()
        for index, content in enumerate(contents)
    }


def _list(names: Mapping[str, str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
