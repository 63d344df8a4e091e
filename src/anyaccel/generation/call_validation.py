"""Validation of text-to-image calls against the signature and outputs of a pipeline."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from diffusers.utils.outputs import BaseOutput
from PIL import Image

from anyaccel.call_limits import SIDES, check_multiple
from anyaccel.errors import UsageError, nearest
from anyaccel.generation.guider import GUIDANCE_SCALE, read_guider_scale
from anyaccel.runtime.call_parameters import (
    find_missing_arguments,
    list_block_outputs,
    read_blocks,
    read_call_parameters,
)
from anyaccel.runtime.introspection import plain_class

__all__ = [
    "check_image_call",
    "find_default",
    "find_missing_image",
    "list_parameters",
    "pick_images",
    "select_image_output",
]

# Names that pipeline outputs use for their images.
_OUTPUT_FIELDS = ("images", "image")
# Names that the blocks of modular pipelines use for their other results.
_OTHER_OUTPUTS = ("videos", "audio", "audios", "sound", "action")
# Names that pipeline calls use for an input image.
_INPUT_IMAGES = ("image", "control_image", "mask_image")
_USE_PYTHON = (
    "in Python, load it with anyaccel.DiffusionPipeline.from_pretrained(model), then call pipe.to(device) and pipe(…)"
)


def check_image_call(pipe: Any, call: Mapping[str, Any]) -> None:
    """Raise UsageError if the pipeline does not generate images from a prompt or rejects an argument.

    Call this before running the pipeline. Otherwise, an unsupported output type would be detected only
    after the last denoising step.
    """
    parameters = read_call_parameters(pipe)
    pipeline = plain_class(pipe).__name__
    fields = _list_output_fields(pipe)
    if fields and not fields & set(_OUTPUT_FIELDS):
        raise UsageError(f"{pipeline} generates {', '.join(sorted(fields))}, not images", hint=_USE_PYTHON)
    if "prompt" not in parameters:
        raise UsageError(f"{pipeline} does not accept a prompt", hint="use a text-to-image model")
    known = list_parameters(pipe)
    for name in call:
        if name not in known:
            hint = f"omit it; {nearest(name, known)}"
            raise UsageError(f"{pipeline} does not accept the argument {name}", hint=hint)
    passed = {name: value for name, value in call.items() if name in parameters}
    missing = find_missing_arguments(pipe, {"prompt": "", **passed})
    if missing:
        raise UsageError(f"{pipeline} requires {' and '.join(missing)} in addition to a prompt", hint=_USE_PYTHON)
    _check_size(pipe, call)


def _list_output_fields(pipe: Any) -> set[str]:
    """Return the names of a pipeline's outputs, such as `images` or `frames`.

    These are the fields of the output classes in its module, or the outputs of a modular pipeline's blocks.
    """
    if read_blocks(pipe) is not None:
        names = list_block_outputs(pipe)  # all values that the blocks compute, if they are not those of diffusers
        return {name for name in names if name in (*_OUTPUT_FIELDS, *_OTHER_OUTPUTS)} or set(names[-1:])
    # Not the return annotation: many pipelines of diffusers have none.
    module = inspect.getmodule(inspect.unwrap(plain_class(pipe).__call__))
    if module is None:  # for example a class that was created with exec()
        return set()
    classes: list[Any] = [value for value in vars(module).values() if isinstance(value, type)]
    outputs = [kind for kind in classes if issubclass(kind, BaseOutput) and kind is not BaseOutput]
    return {field.name for output in outputs for field in dataclasses.fields(output)}


def _check_size(pipe: Any, call: Mapping[str, Any]) -> None:
    """Raise UsageError if the height or width is not a multiple of the VAE scale factor."""
    # Some pipelines round such a side and only log a warning, for example FluxPipeline
    # (https://github.com/huggingface/diffusers/issues/9904).
    processor = getattr(pipe, "image_processor", None)
    multiple = getattr(getattr(processor, "config", None), "vae_scale_factor", None)
    for name in SIDES:
        side = call.get(name)
        if isinstance(side, int) and isinstance(multiple, int) and multiple > 1:
            check_multiple(name, side, multiple)


def find_default(pipe: Any, name: str) -> Any:
    """Return the default value of a call argument of the pipeline, or None if there is none."""
    parameter = read_call_parameters(pipe).get(name)
    if parameter is None and name == GUIDANCE_SCALE:
        return read_guider_scale(pipe)
    return None if parameter is None or parameter.default is parameter.empty else parameter.default


def find_missing_image(pipe: Any, call: Mapping[str, Any]) -> str | None:
    """Return the first image argument that the pipeline accepts but the call omits, or None."""
    if read_blocks(pipe) is not None:
        return None  # they declare which inputs they require
    parameters = read_call_parameters(pipe)
    return next((name for name in _INPUT_IMAGES if name in parameters and call.get(name) is None), None)


def list_parameters(pipe: Any) -> list[str]:
    """Return the argument names of the pipeline's call, including the guidance scale of a modular pipeline's guider."""
    return [*read_call_parameters(pipe), *([] if read_guider_scale(pipe) is None else [GUIDANCE_SCALE])]


def select_image_output(pipe: Any) -> dict[str, str]:
    """Return the call argument that makes a modular pipeline return its images; none for other pipelines."""
    if read_blocks(pipe) is None:
        return {}
    outputs = list_block_outputs(pipe)
    return {"output": next(name for name in _OUTPUT_FIELDS if name in outputs)}


def pick_images(pipe: Any, output: Any, expected: int = 1) -> list[Image.Image]:
    """Return the images from a pipeline's output; raise if there are not exactly `expected` PIL images."""
    images = output  # of a modular pipeline
    if read_blocks(pipe) is None:
        images = next((value for name in _OUTPUT_FIELDS if (value := getattr(output, name, None)) is not None), None)
    if isinstance(images, list) and len(images) == expected and all(isinstance(item, Image.Image) for item in images):
        return images
    returned = f"an object of type {type(images).__name__}"
    if isinstance(images, list):
        types = " and ".join(sorted({type(item).__name__ for item in images}))
        returned = f"a list of {len(images)} objects of type {types}" if images else "an empty list"
    requested = "one PIL image" if expected == 1 else f"{expected} PIL images"
    raise UsageError(f"{plain_class(pipe).__name__} returned {returned} instead of {requested}", hint=_USE_PYTHON)
