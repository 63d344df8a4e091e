"""What a pipeline's call takes and gives: whether it makes pictures from a prompt, with the arguments given."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from diffusers.utils.outputs import BaseOutput
from PIL import Image

from anyaccel.call_limits import SIDES, check_multiple
from anyaccel.errors import UsageError, nearest
from anyaccel.runtime.pipeline import plain_class

__all__ = ["check_image_call", "find_default", "find_missing_image", "list_parameters", "pick_images"]

_IMAGES = ("images", "image")
"""What pipelines call the pictures in their results."""
_BESIDES = "load it by anyaccel.DiffusionPipeline.from_pretrained, place it with to(), and call it from Python"
_PICTURES = ("image", "control_image", "mask_image")
"""What pipelines call a picture to begin with."""


def check_image_call(pipe: Any, call: Mapping[str, Any]) -> None:
    """Raise, before any step, if the pipeline makes no pictures, or lacks an argument, or takes none of that name."""
    parameters = _parameters(pipe)
    pipeline = plain_class(pipe).__name__
    fields = _list_output_fields(pipe)
    if fields and not fields & set(_IMAGES):
        raise UsageError(f"{pipeline} makes {', '.join(sorted(fields))}, and no pictures", hint=_BESIDES)
    if "prompt" not in parameters:
        raise UsageError(f"{pipeline} takes no prompt", hint="take a model that makes pictures from text")
    for name in call:
        if name not in parameters:
            raise UsageError(f"{pipeline} takes no {name}", hint=f"leave it out; {nearest(name, parameters)}")
    missing = [name for name, one in parameters.items() if one.default is one.empty and name not in ("prompt", *call)]
    if missing:
        raise UsageError(f"{pipeline} needs {' and '.join(missing)} besides a prompt", hint=_BESIDES)
    _check_size(pipe, call)


def _parameters(pipe: Any) -> dict[str, inspect.Parameter]:
    """The arguments that a pipeline names; what it would take unnamed, it would pass over."""
    signature = inspect.signature(plain_class(pipe).__call__)
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: one for name, one in signature.parameters.items() if one.kind in named and name != "self"}


def _list_output_fields(pipe: Any) -> set[str]:
    """Return the fields of the output classes in the module of a pipeline's call, such as `{"frames"}`."""
    module = inspect.getmodule(inspect.unwrap(plain_class(pipe).__call__))
    if module is None:  # a class that was made by `exec`, say: what its call returns is not known
        return set()
    classes: list[Any] = [value for value in vars(module).values() if isinstance(value, type)]
    outputs = [kind for kind in classes if issubclass(kind, BaseOutput) and kind is not BaseOutput]
    return {field.name for output in outputs for field in dataclasses.fields(output)}


def _check_size(pipe: Any, call: Mapping[str, Any]) -> None:
    """A size that the pipeline would round to another, as some do with a warning, is refused."""
    processor = getattr(pipe, "image_processor", None)
    multiple = getattr(getattr(processor, "config", None), "vae_scale_factor", None)
    for name in SIDES:
        side = call.get(name)
        if isinstance(side, int) and isinstance(multiple, int) and multiple > 1:
            check_multiple(name, side, multiple)


def find_default(pipe: Any, name: str) -> Any:
    """What a pipeline takes for an argument that is not given; None if it has no such argument."""
    found = _parameters(pipe).get(name)
    return None if found is None or found.default is found.empty else found.default


def find_missing_image(pipe: Any, call: Mapping[str, Any]) -> str | None:
    """The argument for a picture to begin with that a pipeline has and a call does not give; None if there is none."""
    parameters = _parameters(pipe)
    return next((name for name in _PICTURES if name in parameters and call.get(name) is None), None)


def list_parameters(pipe: Any) -> list[str]:
    """The names of the arguments that a pipeline's call takes."""
    return list(_parameters(pipe))


def pick_images(pipe: Any, output: Any, wanted: int = 1) -> list[Image.Image]:
    """The pictures in a pipeline's result, of which there are as many as were asked for."""
    images = next((value for name in _IMAGES if (value := getattr(output, name, None)) is not None), None)
    if isinstance(images, list) and len(images) == wanted and all(isinstance(one, Image.Image) for one in images):
        return images
    count = f"{len(images)} things" if isinstance(images, list) else type(images).__name__
    pictures = "one picture" if wanted == 1 else f"{wanted} pictures"
    raise UsageError(f"{plain_class(pipe).__name__} gave {count} in place of {pictures}", hint=_BESIDES)
