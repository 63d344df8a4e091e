"""Arguments, number of images and seeds for one pipeline call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from anyaccel.call_limits import SIDES, read_seeds, to_integer
from anyaccel.errors import UsageError
from anyaccel.runtime.keyword_use import reads_keyword
from anyaccel.runtime.library_code import find_source, is_library
from anyaccel.upstream.modular_blocks import find_blocks, read_state

__all__ = ["CallRequest", "bucket_of", "read_call_request", "shape_of", "takes_reference_images"]

_PER_PROMPT = (
    "num_images_per_prompt",
    "num_videos_per_prompt",
    "num_waveforms_per_prompt",
    "num_audios_per_prompt",
)
# Arguments with one element per prompt. The first one that is set is counted: prompt_embeds may come with a prompt, and
# both then have the same length.
_COUNTED = ("prompt", "prompt_embeds", "class_labels", "image_embeds", "image_embeddings")
# Pipelines in which a list of images has references for every prompt (diffusers 0.42).
_REFERENCE_IMAGES = {
    "Flux2Pipeline", "Flux2KleinPipeline", "Flux2KleinKVPipeline", "QwenImageEditPlusPipeline", "QwenImage21Pipeline",
    "BriaFiboEditPipeline", "BriaFibo2Pipeline", "GlmImagePipeline", "OmniGenPipeline", "ZImageOmniPipeline",
}  # fmt: skip
_IMAGE_LISTS = frozenset(("image", "control_image", "input_images"))
# Pipelines in which a list of prompts describes the parts of one video (diffusers 0.42).
_PROMPTS_OF_ONE_VIDEO = {"LTXI2VLongMultiPromptPipeline"}
# Arguments that are converted from NumPy integers to `int`, because they are counted and compared.
_INTEGERS = (*SIDES, *_PER_PROMPT, "num_inference_steps", "num_frames", "batch_size")


@dataclass(frozen=True)
class CallRequest:
    """The arguments of a pipeline call by name, with the number of images and the seeds."""

    arguments: dict[str, Any]
    """All arguments by name, including positional ones."""
    prompts: int
    per_prompt: int
    accepts: frozenset[str]
    """Names of the arguments that the pipeline accepts."""
    seeds: tuple[int, ...] = ()
    """One seed per image; empty if the call has none."""
    positional: tuple[str, ...] = ()
    """Names of the arguments that are passed by position: those that the caller passed so."""
    pipeline: str = ""
    """The name of the pipeline class."""
    per_call: frozenset[str] = frozenset()
    """Names of arguments that apply to all images, even if they have as many elements as there are prompts."""

    @property
    def images(self) -> int:
        """The number of images that the call generates."""
        return self.prompts * self.per_prompt

    @property
    def per_prompt_name(self) -> str | None:
        """The name of the argument for images per prompt, such as `num_images_per_prompt`; None if absent."""
        return next((name for name in _PER_PROMPT if name in self.accepts), None)

    def call(self, function: Callable[..., Any], pipe: Any) -> Any:
        """Call the pipeline's `__call__` function with the arguments."""
        arguments = dict(self.arguments)
        positional = [arguments.pop(name) for name in self.positional]
        return function(pipe, *positional, **arguments)

    def with_arguments(self, **changed: Any) -> CallRequest:
        """Return a copy of the request with the given arguments changed."""
        return replace(self, arguments={**self.arguments, **changed})


def takes_reference_images(pipeline: str) -> bool:
    """Return whether a list of images is a list of references for one image in a pipeline class."""
    return pipeline in _REFERENCE_IMAGES or "ModularPipeline" in pipeline


def read_call_request(
    pipe: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> CallRequest:
    """Return the request for a pipeline call; raise `TypeError` for an unknown argument.

    Raise `UsageError` if both `seed` and `generator` are passed.
    """
    kwargs, signature = dict(kwargs), inspect.signature(call)
    # Some pipelines have a `seed` argument of their own.
    seed = None if "seed" not in kwargs or reads_keyword(call, "seed") else kwargs.pop("seed")
    try:
        bound = signature.bind(pipe, *args, **kwargs)
    except TypeError as error:
        decorated = _bind_to_decorator(_find_decorator(call), (pipe, *args), kwargs)
        if decorated is None:  # Python's own message starts with the name of the function
            raise TypeError(f"{getattr(call, '__qualname__', '__call__')}() {error}") from None
        bound, signature = decorated, decorated.signature
    arguments, accepts, positional = _read_arguments(pipe, signature, bound)
    positional = positional or tuple(arguments)[: len(args)]  # a decorator of the user may read or change them
    accepts |= _block_inputs(pipe)
    # A `__call__` of the user gets its arguments as they are.
    names = _INTEGERS if is_library(find_source(call)) else ()
    integers = {name: to_integer(arguments.get(name)) for name in names}
    arguments.update({name: value for name, value in integers.items() if value is not None})
    name = type(pipe).__name__
    counted = read_state(pipe, arguments) | {name: value for name, value in arguments.items() if value is not None}
    prompts = 1 if name in _PROMPTS_OF_ONE_VIDEO else _count_prompts(counted, accepts)
    request = CallRequest(
        arguments,
        prompts,
        1,
        frozenset(accepts),
        positional=positional,
        pipeline=name,
        per_call=_find_per_call_arguments(pipe),
    )
    request = replace(request, per_prompt=_count_per_prompt(request.per_prompt_name, counted, signature))
    if seed is None:
        return request
    if arguments.get("generator") is not None:
        raise UsageError("seed and generator cannot be used together", hint="pass either seed or generator")
    return replace(request, seeds=read_seeds(seed, request.images))


def _find_decorator(call: Any) -> Any:
    """Return the first function of the user that wraps the pipeline's `__call__`; None if there is none."""
    while hasattr(call, "__wrapped__"):
        if not is_library(find_source(call)):
            return call
        call = call.__wrapped__
    return None


def _read_arguments(
    pipe: Any, signature: inspect.Signature, bound: inspect.BoundArguments
) -> tuple[dict[str, Any], set[str], tuple[str, ...]]:
    """Return the arguments by name, the names that are accepted, and those that must be passed by position."""
    arguments: dict[str, Any] = {}
    accepts: set[str] = set()
    positional: tuple[str, ...] = ()
    for name, parameter in list(signature.parameters.items())[1:]:  # without self
        if parameter.kind is parameter.VAR_POSITIONAL:
            values = bound.arguments.get(name, ())
            if values:
                # Parameters before `*args` can then be passed only by position.
                positional = (*arguments, *_name_values(pipe, len(arguments), values, bound.kwargs))
                arguments.update(zip(positional[len(arguments) :], values, strict=True))
                accepts.update(positional)
            continue
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments.update(bound.arguments.get(name, {}))
            accepts |= bound.arguments.get(name, {}).keys()
        elif name in bound.arguments:
            arguments[name] = bound.arguments[name]
            if parameter.kind is parameter.POSITIONAL_ONLY:
                positional = (*positional, name)
        accepts.add(name)
    return arguments, accepts, positional


def _bind_to_decorator(decorator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments | None:
    """Bind arguments to the signature of a decorator, which may pass others to the function that it wraps."""
    if decorator is None:
        return None
    try:
        return inspect.signature(decorator, follow_wrapped=False).bind(*args, **kwargs)
    except TypeError:
        return None


def _find_per_call_arguments(pipe: Any) -> frozenset[str]:
    """Return the names of arguments with one image per ControlNet, or with reference images for every prompt."""
    if type(pipe).__name__ in _REFERENCE_IMAGES or type(getattr(pipe, "controlnet", None)).__name__.startswith("Multi"):
        return _IMAGE_LISTS
    return frozenset()


def _name_values(pipe: Any, start: int, values: Sequence[Any], keywords: Mapping[str, Any]) -> list[str]:
    """Return names for the values of `*args`, which usually go to the `__call__` of a base class.

    The names are those of the base class's parameters; they are used to count and split the arguments.
    """
    known: list[str] = []
    for base in type(pipe).__mro__:
        function = vars(base).get("__call__")
        kinds = {} if function is None else inspect.signature(function).parameters
        if kinds and not any(parameter.kind is parameter.VAR_POSITIONAL for parameter in kinds.values()):
            known = list(kinds)[1:]
            break
    names = known[start : start + len(values)] + [
        f"*args[{index}]" for index in range(max(0, len(known) - start), len(values))
    ]
    return [f"*args[{index}]" if name in keywords else name for index, name in enumerate(names)]


def _block_inputs(pipe: Any) -> set[str]:
    """Return the input names of a modular pipeline's blocks; return an empty set for other pipelines."""
    blocks = find_blocks(pipe)
    return set() if blocks is None else set(blocks.input_names)


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
    # With an input image, batch_size is not the number of results: Marigold uses it for parts of an ensemble.
    if isinstance(size, int) and size > 0 and "image" not in accepts:
        return size
    return 1 if "prompt" in accepts else _count_input_images(arguments.get("image"))


def _count_input_images(value: Any) -> int:
    """Count the input images of a call without a prompt; a nested list counts as one image."""
    if isinstance(value, torch.Tensor):
        return int(value.shape[0]) if value.dim() == 4 else 1
    flat = isinstance(value, list) and value and not any(isinstance(item, list) for item in value)
    return len(value) if flat else 1


def _count_per_prompt(name: str | None, arguments: Mapping[str, Any], signature: inspect.Signature) -> int:
    if name is None:
        return 1
    default = signature.parameters[name].default if name in signature.parameters else 1
    value = arguments.get(name, default)
    return value if isinstance(value, int) and value > 0 else 1


def bucket_of(request: CallRequest) -> str:
    """Return the image size and the number of images as a string, for example `512 × 512, 1 image`."""
    size = " × ".join(str(request.arguments[name]) for name in ("height", "width") if request.arguments.get(name))
    return f"{size or 'default size'}, {request.images} image{'s' if request.images != 1 else ''}"


# The text is part of the key of out-of-memory outcomes on disk: a change makes existing outcomes unreadable.
def shape_of(request: CallRequest) -> str:
    """Return a string that identifies a call's tensor shapes, for example `512 × 512, 4 images`.

    The string includes the shapes of tensor arguments and the guidance scale, if there are any.
    """
    sizes = [str(request.arguments[name]) for name in ("width", "height", "num_frames") if request.arguments.get(name)]
    others = [f"{name} {value}" for name, value in sorted(_shapes(request.arguments).items())]
    if request.arguments.get("guidance_scale") is not None:  # guidance can double the batch
        others.append(f"guidance {request.arguments['guidance_scale']}")
    images = f"{request.images} image{'s' if request.images != 1 else ''}"
    return ", ".join([" × ".join(sizes) or "default size", images, *others])


def _shapes(arguments: Mapping[str, Any]) -> dict[str, Any]:
    shapes = {name: tuple(value.shape) for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    # PIL images have a tuple as size; arrays and other objects have an integer or a method.
    images = {name: value.size for name, value in arguments.items() if hasattr(value, "size") and name not in shapes}
    return shapes | {name: size for name, size in images.items() if isinstance(size, tuple)}
