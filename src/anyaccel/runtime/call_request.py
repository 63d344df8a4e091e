"""One call of a pipeline, read: its arguments by name, how many images it makes, and their seeds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from anyaccel.call_limits import SIDES, read_seeds, to_integer
from anyaccel.errors import UsageError

__all__ = ["CallRequest", "bucket_of", "read_call_request", "shape_of"]

_PER_PROMPT = (
    "num_images_per_prompt",
    "num_videos_per_prompt",
    "num_waveforms_per_prompt",
    "num_audios_per_prompt",
)
_COUNTED = ("prompt", "prompt_embeds", "class_labels", "image_embeds", "image_embeddings")
_INTEGERS = (*SIDES, *_PER_PROMPT, "num_inference_steps", "num_frames", "batch_size")
"""What is counted and compared here, and so is Python's where it was an integer of NumPy's."""


@dataclass(frozen=True)
class CallRequest:
    """What a caller asked a pipeline for."""

    arguments: dict[str, Any]
    """By name, positional ones too."""
    prompts: int
    per_prompt: int
    accepts: frozenset[str]
    """The names that the pipeline takes."""
    seeds: tuple[int, ...] = ()
    """One an image; empty where none were given."""

    @property
    def images(self) -> int:
        """How many images the call makes."""
        return self.prompts * self.per_prompt

    @property
    def per_prompt_name(self) -> str | None:
        """What the pipeline calls the number of images to a prompt; None if it has no such argument."""
        return next((name for name in _PER_PROMPT if name in self.accepts), None)

    def with_arguments(self, **changed: Any) -> CallRequest:
        """The same request with some arguments changed."""
        return replace(self, arguments={**self.arguments, **changed})


def read_call_request(
    pipe: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> CallRequest:
    """Read a call; a wrong argument raises what the pipeline itself would raise."""
    kwargs = dict(kwargs)
    seed = kwargs.pop("seed", None)
    signature = inspect.signature(call)
    bound = signature.bind(pipe, *args, **kwargs)
    arguments, accepts = {}, set()
    for name, parameter in list(signature.parameters.items())[1:]:
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments.update(bound.arguments.get(name, {}))
            accepts |= bound.arguments.get(name, {}).keys()
        elif name in bound.arguments:
            arguments[name] = bound.arguments[name]
        accepts.add(name)
    accepts |= _block_inputs(pipe)
    integers = {name: to_integer(arguments.get(name)) for name in _INTEGERS}
    arguments.update({name: value for name, value in integers.items() if value is not None})
    request = CallRequest(arguments, _count_prompts(arguments, accepts), 1, frozenset(accepts))
    request = replace(request, per_prompt=_count_per_prompt(request, signature))
    if seed is None:
        return request
    if arguments.get("generator") is not None:
        raise UsageError("seed and generator are both given", hint="give one of them")
    return replace(request, seeds=read_seeds(seed, request.images))


def _block_inputs(pipe: Any) -> set[str]:
    """What a modular pipeline takes, by its blocks."""
    blocks = getattr(pipe, "blocks", None)
    return set(getattr(blocks, "input_names", ()) or ())


def _count_prompts(arguments: dict[str, Any], accepts: set[str]) -> int:
    for name in _COUNTED:
        value = arguments.get(name)
        if isinstance(value, str):
            return 1
        if isinstance(value, torch.Tensor):
            return int(value.shape[0])
        if isinstance(value, Sequence) and value:
            return len(value)
        if isinstance(value, dict) and isinstance(value.get("prompt"), list):
            return len(value["prompt"])
    size = arguments.get("batch_size")
    if isinstance(size, int) and size > 0:
        return size
    return 1 if "prompt" in accepts else _count_pictures(arguments.get("image"))


def _count_pictures(value: Any) -> int:
    """Where nothing can be prompted, several pictures ask for that many images; lists of lists mean other things."""
    if isinstance(value, torch.Tensor):
        return int(value.shape[0]) if value.dim() == 4 else 1
    flat = isinstance(value, list) and value and not any(isinstance(item, list) for item in value)
    return len(value) if flat else 1


def _count_per_prompt(request: CallRequest, signature: inspect.Signature) -> int:
    name = request.per_prompt_name
    if name is None:
        return 1
    default = signature.parameters[name].default if name in signature.parameters else 1
    value = request.arguments.get(name, default)
    return value if isinstance(value, int) and value > 0 else 1


def bucket_of(request: CallRequest) -> str:
    """The size and the number of images of a call, in words: `512 × 512, 1 image`."""
    size = " × ".join(str(request.arguments[name]) for name in ("height", "width") if request.arguments.get(name))
    return f"{size or 'default size'}, {request.images} image{'s' if request.images != 1 else ''}"


def shape_of(request: CallRequest) -> str:
    """What of a call decides the shapes inside, in words: `512 × 512, 4 images`."""
    sizes = [str(request.arguments[name]) for name in ("width", "height", "num_frames") if request.arguments.get(name)]
    others = [f"{name} {value}" for name, value in sorted(_shapes(request.arguments).items())]
    if request.arguments.get("guidance_scale") is not None:  # it may double the batch inside
        others.append(f"guidance {request.arguments['guidance_scale']}")
    images = f"{request.images} image{'s' if request.images != 1 else ''}"
    return ", ".join([" × ".join(sizes) or "default size", images, *others])


def _shapes(arguments: Mapping[str, Any]) -> dict[str, Any]:
    shapes = {name: tuple(value.shape) for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    pictures = {name: value.size for name, value in arguments.items() if hasattr(value, "size") and name not in shapes}
    return shapes | {name: size for name, size in pictures.items() if isinstance(size, tuple)}
