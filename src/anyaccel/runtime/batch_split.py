"""Batch splitting: run a batch as several pipeline calls and join their results.

On devices with unreliable support for batches, each call generates one image. A batch that does
not fit in memory is also split.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy
import torch
from PIL.Image import Image

from anyaccel.runtime.call_request import CallRequest

__all__ = ["INPUT_IMAGES", "SharedProgress", "find_split_obstacle", "join_results", "split_request"]

# Arguments that apply to the whole call and are never split. Their length can equal the number of prompts by chance,
# so it does not show whether an argument is per image. Lists of numbers are not split either.
_PER_CALL_ARGUMENTS = {
    "timesteps", "sigmas", "guidance_schedule", "conditioning_scale",
    "callback_on_step_end_tensor_inputs", "prior_callback_on_step_end_tensor_inputs",
    "ip_adapter_image", "ip_adapter_image_embeds", "negative_ip_adapter_image", "negative_ip_adapter_image_embeds",
    "editing_prompt", "gligen_phrases", "gligen_boxes", "gligen_images", "complex_human_instruction", "chi_prompt",
    "video", "control_video", "mask_video", "face_video", "pose_video", "background_video", "conditioning_frames",
    "reference_images", "token_indices", "control_mode",
}  # fmt: skip
# Lists of numbers that do have one element per image.
_PER_IMAGE_NUMBERS = {"class_labels", "decode_timestep", "decode_noise_scale"}
INPUT_IMAGES = ("image", "mask_image")


# In diffusers 0.42, the images of these pipelines depend on the other images or prompts of the same call.
_PAD_TO_LONGEST_PROMPT = {"AudioLDM2Pipeline", "LongCatAudioDiTPipeline"}
_MIX_IMAGES = {"StableDiffusionPanoramaPipeline"}
_MIX_PROMPTS_AND_IMAGES = {
    "HunyuanDiTPipeline", "Kandinsky5T2IPipeline", "KandinskyCombinedPipeline", "LTX2Pipeline", "LTXPipeline",
    "Lumina2Pipeline", "LuminaPipeline",
}  # fmt: skip


def find_split_obstacle(request: CallRequest) -> str:
    """Return why the images of a call cannot be generated in several calls; empty if they can."""
    generators = request.arguments.get("generator")
    if isinstance(generators, list | tuple) and len({id(item) for item in generators}) < len(generators):
        return "the list of generators contains the same generator twice"
    if request.pipeline in _MIX_IMAGES:
        return f"in {request.pipeline}, the images of a call are not independent of one another"
    if request.prompts > 1 and request.pipeline in _PAD_TO_LONGEST_PROMPT:
        return f"{request.pipeline} pads prompts to the longest one of the call"
    if request.prompts > 1 and request.per_prompt > 1 and request.pipeline in _MIX_PROMPTS_AND_IMAGES:
        return f"{request.pipeline} orders several images of several prompts inconsistently"
    return ""


def split_request(request: CallRequest, images_per_call: int | None, first: int = 0) -> list[CallRequest]:
    """Split a request into requests of at most `images_per_call` images, starting at image `first`."""
    limit = images_per_call or request.images
    if not first and request.images <= limit:
        return [_repeat_input_images(request)]
    chunks: list[CallRequest] = []
    for start in range(first, request.images, limit):
        rows = range(start, min(start + limit, request.images))
        chunks += _select_rows(request, rows)
    return [_repeat_input_images(chunk) for chunk in chunks]


def _repeat_input_images(request: CallRequest) -> CallRequest:
    """Repeat a shared input image for each output image if the request has several seeds."""
    # diffusers encodes a shared image once, with noise from the first generator of the list. All other images would
    # differ from those that their seeds give in a call of their own (diffusers 0.42).
    if len(request.seeds) < 2 or "strength" not in request.accepts:
        return request
    images = {name: request.arguments[name] for name in INPUT_IMAGES if request.arguments.get(name) is not None}
    return request.with_arguments(**{name: _repeat(value, request) for name, value in images.items()})


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


def _select_rows(request: CallRequest, rows: range) -> Iterator[CallRequest]:
    """Yield the requests that generate a range of a request's images.

    If the range includes all images of each of its prompts, it becomes one request. Otherwise, it
    becomes one request per prompt.
    """
    # A call has the same number of images for every prompt, so a partial prompt needs a call of its own.
    prompts = sorted({row // request.per_prompt for row in rows})
    whole = len(rows) == len(prompts) * request.per_prompt
    by_prompt = [([prompt], [row for row in rows if row // request.per_prompt == prompt]) for prompt in prompts]
    groups = [(prompts, list(rows))] if whole else by_prompt
    for chosen, images in groups:
        arguments = {name: _select(name, value, request, chosen, images) for name, value in request.arguments.items()}
        per_prompt = len(images) // len(chosen)
        name = request.per_prompt_name
        if name is not None:
            arguments[name] = per_prompt
        if "batch_size" in arguments:
            arguments["batch_size"] = len(images)
        seeds = tuple(request.seeds[image] for image in images) if request.seeds else ()
        yield replace(request, arguments=arguments, prompts=len(chosen), per_prompt=per_prompt, seeds=seeds)


def _select(name: str, value: Any, request: CallRequest, prompts: list[int], images: list[int]) -> Any:
    """Return an argument's elements for the given prompts or images; return shared arguments unchanged."""
    if name in _PER_CALL_ARGUMENTS or name in request.per_call or value is None or isinstance(value, str | dict):
        return value
    if isinstance(value, torch.Tensor | numpy.ndarray):
        if value.ndim == 0:
            return value
        # Latents, such as `audio_latents`, have one row per image, other tensors one row per prompt.
        if value.shape[0] == request.images and (name.endswith("latents") or request.per_prompt == 1):
            return value[images]
        return value[prompts] if value.shape[0] == request.prompts and request.prompts > 1 else value
    if isinstance(value, Sequence):
        if name not in _PER_IMAGE_NUMBERS and all(isinstance(item, int | float) for item in value):
            return value
        if name == "generator" and len(value) == request.images:
            chosen = [value[image] for image in images]
            return chosen[0] if len(chosen) == 1 else chosen
        if len(value) == request.prompts and request.prompts > 1:
            return [value[prompt] for prompt in prompts]
    return value


def join_results(results: list[Any]) -> Any:
    """Join the results of several pipeline calls into one result of the same type."""
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
    if isinstance(first, dict):
        return {name: _join([value[name] for value in values]) for name in first}
    return first


class SharedProgress:
    """One progress bar shared by several pipeline calls."""

    def __init__(self, calls: int) -> None:
        self.calls = calls
        self.bar: Any = None

    def begin(self, make_bar: Any, iterable: Any = None, total: int | None = None, **options: Any) -> _CallProgress:
        """Return a progress bar for one call; the first call creates the shared bar with `make_bar`."""
        if iterable is not None and total is None:
            iterable = list(iterable)
            total = len(iterable)
        if self.bar is None:
            self.bar = make_bar(total=(total or 0) * self.calls, **options)
        return _CallProgress(self.bar, iterable)

    def close(self) -> None:
        """Close the shared progress bar, if one was created."""
        if self.bar is not None:
            self.bar.close()


class _CallProgress:
    """A progress bar for one call, with the tqdm interface, that updates the shared bar."""

    def __init__(self, bar: Any, iterable: Any) -> None:
        self.bar, self.iterable = bar, iterable

    def __enter__(self) -> _CallProgress:
        return self

    def __exit__(self, *error: object) -> None: ...

    def __iter__(self) -> Iterator[Any]:
        for item in self.iterable:
            yield item
            self.bar.update()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.bar, name)

    def close(self) -> None:
        """Do nothing: other calls still use the shared bar."""
