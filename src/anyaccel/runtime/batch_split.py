"""Batches: where a device does not run them reliably, one image a call, in order, under one progress bar."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy
import torch
from PIL.Image import Image

from anyaccel.runtime.call_request import CallRequest

__all__ = ["SharedProgress", "join_results", "split_request"]

_WHOLE = {
    "timesteps", "sigmas", "guidance_schedule", "conditioning_scale",
    "callback_on_step_end_tensor_inputs", "prior_callback_on_step_end_tensor_inputs",
    "ip_adapter_image", "ip_adapter_image_embeds", "negative_ip_adapter_image", "negative_ip_adapter_image_embeds",
    "editing_prompt", "gligen_phrases", "gligen_boxes", "gligen_images", "complex_human_instruction", "chi_prompt",
    "video", "control_video", "mask_video", "face_video", "pose_video", "background_video", "conditioning_frames",
    "reference_images", "token_indices", "control_mode",
}  # fmt: skip
"""Lists and tensors that belong to the call and not to an image, whatever their length; so do lists of numbers."""
_NUMBER_AN_IMAGE = {"class_labels", "decode_timestep", "decode_noise_scale"}
_PICTURES = ("image", "mask_image")


def split_request(request: CallRequest, images_per_call: int | None, first: int = 0) -> list[CallRequest]:
    """The request from one image on as several of at most that many; itself where it is small enough."""
    at_once = images_per_call or request.images
    if not first and request.images <= at_once:
        return [_give_each_its_picture(request)]
    parts: list[CallRequest] = []
    for start in range(first, request.images, at_once):
        rows = range(start, min(start + at_once, request.images))
        parts += _take_rows(request, rows)
    return [_give_each_its_picture(part) for part in parts]


def _give_each_its_picture(request: CallRequest) -> CallRequest:
    """Seeded images that begin with one picture get it once each.

    Diffusers encodes a shared picture once, with the noise of the first image's generator: the others would be other
    images than the ones that their seeds give alone.
    """
    if len(request.seeds) < 2 or "strength" not in request.accepts:
        return request
    pictures = {name: request.arguments[name] for name in _PICTURES if request.arguments.get(name) is not None}
    return request.with_arguments(**{name: _spread(value, request) for name, value in pictures.items()})


def _spread(value: Any, request: CallRequest) -> Any:
    """One picture an image: of one for all, or of one a prompt."""
    # What takes embeddings of images, as Kandinsky does, repeats the pictures of a prompt itself.
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


def _take_rows(request: CallRequest, rows: range) -> Iterator[CallRequest]:
    """Some images of a request: whole prompts together, parts of a prompt each by itself."""
    prompts = sorted({row // request.per_prompt for row in rows})
    whole = len(rows) == len(prompts) * request.per_prompt
    by_prompt = [([prompt], [row for row in rows if row // request.per_prompt == prompt]) for prompt in prompts]
    groups = [(prompts, list(rows))] if whole else by_prompt
    for chosen, images in groups:
        arguments = {name: _take(name, value, request, chosen, images) for name, value in request.arguments.items()}
        per_prompt = len(images) // len(chosen)
        name = request.per_prompt_name
        if name is not None:
            arguments[name] = per_prompt
        if "batch_size" in arguments:
            arguments["batch_size"] = len(images)
        seeds = tuple(request.seeds[image] for image in images) if request.seeds else ()
        yield replace(request, arguments=arguments, prompts=len(chosen), per_prompt=per_prompt, seeds=seeds)


def _take(name: str, value: Any, request: CallRequest, prompts: list[int], images: list[int]) -> Any:
    """The part of one argument that belongs to some prompts, or to some images of theirs."""
    if name in _WHOLE or value is None or isinstance(value, str | dict):
        return value
    if isinstance(value, torch.Tensor | numpy.ndarray):
        if value.ndim == 0:
            return value
        if value.shape[0] == request.images and (name == "latents" or request.per_prompt == 1):
            return value[images]
        return value[prompts] if value.shape[0] == request.prompts and request.prompts > 1 else value
    if isinstance(value, Sequence):
        if name not in _NUMBER_AN_IMAGE and all(isinstance(item, int | float) for item in value):
            return value
        if name == "generator" and len(value) == request.images:
            chosen = [value[image] for image in images]
            return chosen[0] if len(chosen) == 1 else chosen
        if len(value) == request.prompts and request.prompts > 1:
            return [value[prompt] for prompt in prompts]
    return value


def join_results(results: list[Any]) -> Any:
    """The results of several calls as the result of one."""
    if len(results) == 1:
        return results[0]
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
    return first


class SharedProgress:
    """One progress bar for several calls of a pipeline, each of which thinks that it has its own."""

    def __init__(self, calls: int) -> None:
        self.calls = calls
        self.bar: Any = None

    def begin(self, make_bar: Any, iterable: Any = None, total: int | None = None, **options: Any) -> _Part:
        """What a pipeline gets in place of a progress bar; the real one is made once."""
        if iterable is not None and total is None:
            iterable = list(iterable)
            total = len(iterable)
        if self.bar is None:
            self.bar = make_bar(total=(total or 0) * self.calls, **options)
        return _Part(self.bar, iterable)

    def close(self) -> None:
        """End the bar."""
        if self.bar is not None:
            self.bar.close()


class _Part:
    """One call's share of the bar."""

    def __init__(self, bar: Any, iterable: Any) -> None:
        self.bar, self.iterable = bar, iterable

    def __enter__(self) -> _Part:
        return self

    def __exit__(self, *error: object) -> None: ...

    def __iter__(self) -> Iterator[Any]:
        for item in self.iterable:
            yield item
            self.bar.update()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.bar, name)

    def close(self) -> None:
        """The bar itself goes on."""
