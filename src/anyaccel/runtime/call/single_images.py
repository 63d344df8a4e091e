"""Calls for one of several images, for seeds whose images cannot be generated in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy
import torch
from PIL.Image import Image

from anyaccel.errors import UsageError
from anyaccel.runtime.call_request import CallRequest
from anyaccel.upstream.modular_blocks import STATE_ARGUMENT

__all__ = ["join_results", "repeat_input_images", "select_image"]

_INPUT_IMAGES = ("image", "mask_image")
# Lists of settings for the whole call.
_SETTINGS = {
    "timesteps", "sigmas", "guidance_schedule", "callback_on_step_end_tensor_inputs",
    "prior_callback_on_step_end_tensor_inputs",
}  # fmt: skip
_HINT = "generate the images in separate calls, one per seed"


def repeat_input_images(request: CallRequest) -> CallRequest:
    """Repeat a shared input image for each image of a request with several seeds; return other requests unchanged."""
    # diffusers encodes a shared image once, with noise from the first generator of the list. All other images would
    # differ from those that their seeds give in a call of their own (diffusers 0.42).
    if "strength" not in request.accepts:
        return request
    images = {name: request.arguments[name] for name in _INPUT_IMAGES if request.arguments.get(name) is not None}
    repeated = {name: _repeat(value, request) for name, value in images.items()}
    changed = any(repeated[name] is not value for name, value in images.items())
    return request.with_arguments(**repeated) if changed else request


def _repeat(value: Any, request: CallRequest) -> Any:
    """Return one input image per output image, repeating a shared image or each prompt's image."""
    # Pipelines that accept image embeddings, such as Kandinsky, repeat the images of a prompt themselves.
    each = 1 if "image_embeds" in request.accepts else request.per_prompt
    if isinstance(value, Image):
        return [value] * (request.prompts * each)
    if isinstance(value, torch.Tensor | numpy.ndarray):
        batched = value.ndim == 4
    else:
        batched = isinstance(value, list) and not any(isinstance(item, list) for item in value)
    if not batched or len(value) not in (1, request.prompts):
        return value
    rows = [row // each if len(value) > 1 else 0 for row in range(request.prompts * each)]
    return [value[row] for row in rows] if isinstance(value, list) else value[rows]


def select_image(request: CallRequest, image: int) -> CallRequest:
    """Return the request for one image of a request with several seeds.

    Raise `UsageError` if it is not certain which part of an argument belongs to the image.
    """
    arguments = {name: _select(name, value, request, image) for name, value in request.arguments.items()}
    if request.per_prompt_name is not None:
        arguments[request.per_prompt_name] = 1
    if "batch_size" in arguments:
        arguments["batch_size"] = 1
    return replace(request, arguments=arguments, prompts=1, per_prompt=1, seeds=(request.seeds[image],))


def _select(name: str, value: Any, request: CallRequest, image: int) -> Any:
    if name == STATE_ARGUMENT and value is not None and request.prompts > 1:
        raise _make_part_error(name, request)
    if not isinstance(value, torch.Tensor | numpy.ndarray | list | tuple | dict) or name in _SETTINGS:
        return value
    length = value.shape[0] if isinstance(value, torch.Tensor | numpy.ndarray) and value.ndim else 0
    length = len(value) if isinstance(value, list | tuple) else length
    if name.endswith("latents") and length == request.images:
        return value[image : image + 1]
    if request.prompts == 1:
        return value
    prompt = image // request.per_prompt
    # Other lists of images may be references for every prompt.
    has_own_images = "strength" in request.accepts or "prompt" not in request.accepts
    is_image = name in _INPUT_IMAGES and has_own_images and name not in request.per_call
    if length == request.prompts and (is_image or _is_per_prompt(name)):
        return value[prompt : prompt + 1]
    numbers = isinstance(value, Sequence) and all(isinstance(item, int | float) for item in value)
    if isinstance(value, torch.Tensor | numpy.ndarray | dict) or length not in (request.prompts, request.images):
        known = not isinstance(value, dict) and length in (0, 1)
    else:
        known = numbers
    if known:
        return value
    raise _make_part_error(name, request)


def _make_part_error(name: str, request: CallRequest) -> UsageError:
    return UsageError(
        f"{request.images} images with seeds cannot be generated one by one: it is not known which part of {name!r} "
        "belongs to which image",
        hint=_HINT,
    )


def _is_per_prompt(name: str) -> bool:
    """Return whether an argument has one element per prompt."""
    return name.startswith(("prompt", "negative_prompt")) or name in ("class_labels", "image_embeds")


def join_results(results: list[Any]) -> Any:
    """Join the results of several pipeline calls into one result of the same type."""
    first = results[0]
    if isinstance(first, tuple):
        return tuple(_join([result[position] for result in results]) for position in range(len(first)))
    if hasattr(first, "to_tuple"):
        names = [field.name for field in fields(first)]
        return type(first)(**{name: _join([getattr(result, name) for result in results]) for name in names})
    return _join(results)


def _join(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(values) if first.dim() else torch.stack(values)
    if isinstance(first, numpy.ndarray):
        return numpy.concatenate(values)
    if isinstance(first, list):
        return [item for value in values for item in value]
    if isinstance(first, dict):
        return {name: _join([value[name] for value in values]) for name in first}
    if all(value is None for value in values):
        return None
    raise UsageError(f"results with a {type(first).__name__} of several images cannot be joined", hint=_HINT)
