"""Split of a batch's random numbers: which part of the batch's noise each of several pipeline calls needs.

The whole batch and a part of it are run with shapes only. A draw with the same shape in both is shared by
all images, and a draw with more rows in the batch has one row per image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from anyaccel.errors import first_line
from anyaccel.runtime.call_request import CallRequest
from anyaccel.runtime.introspection import find_components, plain_class
from anyaccel.runtime.workarounds.noise import ChunkDraw
from anyaccel.tracing.draw_trace import DrawRecord, DrawTrace
from anyaccel.tracing.meta_clone import clone_pipeline
from anyaccel.tracing.meta_module import map_tensors

__all__ = ["CannotSplitError", "NothingToSplitError", "TracedDraws", "match_draws", "trace_draws"]

# Code of the user, which a trace must not run.
_CALLBACKS = ("callback", "callback_on_step_end", "callback_on_step_end_tensor_inputs", "callback_steps")
# The number of values that these functions draw depends on the values of a tensor, or they draw one permutation.
_NOT_PER_ROW = ("poisson", "randperm")
# Functions with several rows per image, one per token: they accept at most two dimensions.
_ROW_PER_TOKEN = ("multinomial",)


class CannotSplitError(Exception):
    """The noise of a batch cannot be divided among several pipeline calls."""


class NothingToSplitError(Exception):
    """The pipeline returns the same number of images for one image as for the whole batch."""


@dataclass(frozen=True)
class TracedDraws:
    """The draws of a traced call, and the number of images that it returned."""

    draws: tuple[DrawRecord, ...]
    returned: int
    images: int
    generators: int
    """Length of the list of generators; 0 for a single generator or none."""


def trace_draws(pipe: Any, requests: Sequence[CallRequest], cache: dict[str, TracedDraws]) -> list[TracedDraws]:
    """Run requests with shapes only, and return the draws of each; raise `CannotSplitError` if that fails.

    Requests with the same shapes and settings are traced once and kept in `cache`.
    """
    keys = [_make_key(pipe, request) for request in requests]
    new = {key: request for key, request in zip(keys, requests, strict=True) if key not in cache}
    trace = DrawTrace()
    try:
        clone = clone_pipeline(pipe, plain_class(pipe), trace) if new else None
        cache |= {key: _trace(clone, trace, request) for key, request in new.items()}
    except Exception as error:  # a pipeline can fail in any way without the values of its models
        reason = f"the pipeline cannot be run with shapes only ({type(error).__name__}: {first_line(error)})"
        raise CannotSplitError(reason) from error
    return [cache[key] for key in keys]


def _make_key(pipe: Any, request: CallRequest) -> str:
    """Return a text that identifies what a pipeline's draws depend on."""
    components = [
        (name, type(component).__name__, str(component.config) if hasattr(component, "set_timesteps") else "")
        for name, component in find_components(pipe).items()
    ]
    return f"{components} {_describe(request.arguments)}"


def _describe(value: Any) -> Any:
    if isinstance(value, torch.Tensor | numpy.ndarray):
        return tuple(value.shape), str(value.dtype)
    if isinstance(value, Mapping):
        return {name: _describe(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_describe(item) for item in value]
    if value is None or isinstance(value, str | int | float):
        return value
    return type(value).__name__, getattr(value, "size", None)  # PIL images have a size


def _trace(clone: Any, trace: DrawTrace, request: CallRequest) -> TracedDraws:
    arguments = {name: value for name, value in request.arguments.items() if name not in _CALLBACKS}
    passed = arguments.get("generator")
    count = len(passed) if isinstance(passed, list | tuple) else 0
    generators = [torch.Generator("cpu") for _ in range(count or 1)]
    if passed is not None:
        arguments["generator"] = generators if count else generators[0]
    draws, result = trace.record(clone, _to_cpu(arguments), generators)
    return TracedDraws(tuple(draws), _count_returned(result), request.images, count)


def _to_cpu(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: map_tensors(value, lambda tensor: tensor.detach().cpu()) for name, value in arguments.items()}


def _count_returned(result: Any) -> int:
    values = result.to_tuple() if hasattr(result, "to_tuple") else result
    first = values[0] if isinstance(values, tuple) else values
    return len(first) if isinstance(first, list | torch.Tensor | numpy.ndarray) else 1


def match_draws(batch: TracedDraws, chunk: TracedDraws, first: int) -> list[ChunkDraw]:
    """Return the draws of a chunk that starts at image `first` of the batch.

    Raise `CannotSplitError` if a draw has no certain counterpart, and `NothingToSplitError` if the
    pipeline returns no more images for the whole batch.
    """
    if batch.returned == chunk.returned:
        raise NothingToSplitError
    if batch.returned * chunk.images != chunk.returned * batch.images:
        returned = f"{batch.returned} results for {batch.images} images and {chunk.returned} for {chunk.images}"
        raise CannotSplitError(f"the pipeline returns {returned}")
    batch_groups, chunk_groups = _group(batch), _group(chunk)
    if len(batch_groups) != len(chunk_groups):
        raise CannotSplitError(
            f"the pipeline draws {len(batch_groups)} random tensors for {batch.images} images, but "
            f"{len(chunk_groups)} for {chunk.images}"
        )
    return [
        draw
        for whole, part in zip(batch_groups, chunk_groups, strict=True)
        for draw in _match(whole, part, batch, chunk, first)
    ]


def _group(traced: TracedDraws) -> list[list[DrawRecord]]:
    """Group draws that a pipeline makes one by one from a list of generators: one for each image."""
    groups: list[list[DrawRecord]] = []
    for draw in traced.draws:
        last = groups[-1][-1] if groups else None
        follows = last is not None and draw.generator is not None and last.generator == draw.generator - 1 >= 0
        if last is not None and follows and (last.function, last.shape) == (draw.function, draw.shape):
            groups[-1].append(draw)
        else:
            groups.append([draw])
    return groups


def _match(
    whole: list[DrawRecord], part: list[DrawRecord], batch: TracedDraws, chunk: TracedDraws, first: int
) -> list[ChunkDraw]:
    """Return the draws of a chunk for one group of draws of the batch."""
    one, own = whole[0], part[0]
    if one.function == own.function and one.generator == own.generator:
        per_image = len(whole) == batch.images and len(part) == chunk.images
        if batch.generators and one.generator == 0 and one.shape == own.shape and per_image:
            # Each image draws from its own generator.
            own_draw = ChunkDraw(own.function, own.shape, own.shape, advances_first_image=first > 0)
            others = ChunkDraw(own.function, own.shape, own.shape)
            return [own_draw, *[others] * (len(part) - 1)]
        if len(whole) == len(part) == 1:
            if one.shape == own.shape:
                by_first = bool(batch.generators) and one.generator == 0
                return [ChunkDraw(own.function, own.shape, one.shape, by_first_image=by_first)]
            rows = _count_rows(one, own, batch.images, chunk.images)
            if rows is not None:
                return [ChunkDraw(own.function, own.shape, one.shape, first * rows)]
    raise CannotSplitError(
        f"the pipeline draws {one.function} of shape {one.shape} for {batch.images} images and {own.function} of "
        f"shape {own.shape} for {chunk.images}, so it is unknown which values belong to which image"
    )


def _count_rows(one: DrawRecord, own: DrawRecord, images: int, chunk_images: int) -> int | None:
    """Return the number of rows per image; None if the rows cannot be attributed to images with certainty."""
    if not one.shape or not own.shape or one.shape[1:] != own.shape[1:] or one.function in _NOT_PER_ROW:
        return None
    rows, rest = divmod(own.shape[0], chunk_images)
    if rest or one.shape[0] != rows * images:
        return None
    # Several rows per image may be ordered by image, or by the halves of classifier-free guidance: Stable Diffusion 3
    # with a ControlNet encodes the control image once for each half (diffusers 0.42).
    return rows if rows == 1 or one.function in _ROW_PER_TOKEN else None
