"""Batches: where a device does not run them reliably, one image a call, in order, under one progress bar."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy
import torch

from anyaccel.runtime.request import Request

__all__ = ["SharedProgress", "join_results", "split_request"]

_WHOLE = {
    "timesteps", "sigmas", "height", "width", "callback_on_step_end_tensor_inputs", "target_size", "original_size",
    "crops_coords_top_left", "negative_original_size", "negative_crops_coords_top_left", "negative_target_size",
    "controlnet_conditioning_scale", "control_guidance_start", "control_guidance_end", "control_mode",
    "ip_adapter_image", "ip_adapter_image_embeds", "negative_ip_adapter_image_embeds", "clip_skip", "token_indices",
}  # fmt: skip
"""Lists that belong to the call and not to an image, whatever their length."""


def split_request(request: Request, images_per_call: int | None) -> list[Request]:
    """The request as several of at most that many images; itself where it is small enough."""
    if images_per_call is None or request.images <= images_per_call:
        return [request]
    parts = []
    for first in range(0, request.images, images_per_call):
        rows = range(first, min(first + images_per_call, request.images))
        parts += list(_take_rows(request, rows))
    return parts


def _take_rows(request: Request, rows: range) -> Iterator[Request]:
    """Some images of a request: whole prompts together, images of one prompt by their number."""
    prompts = sorted({row // request.per_prompt for row in rows})
    whole = len(rows) == len(prompts) * request.per_prompt
    groups = [(prompts, list(rows))] if whole else [([row // request.per_prompt], [row]) for row in rows]
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


def _take(name: str, value: Any, request: Request, prompts: list[int], images: list[int]) -> Any:
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
