"""Pipeline arguments that a client can set with JSON values, read from the signature of the pipeline's call."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping

__all__ = ["find_settable_arguments"]

_JSON_TYPES = {"bool": "boolean", "int": "integer", "float": "number", "str": "string"}
_LIST = re.compile(r"\b(?:list|List|tuple|Tuple|Sequence)\[([^\[\]]*)\]")
# Arguments that the service sets itself, from other fields of a request, or that change what a call returns.
_OWN = frozenset(
    ("prompt", "negative_prompt", "height", "width", "num_frames", "num_inference_steps", "guidance_scale", "strength",
     "seed", "fps", "frame_rate", "output", "output_type", "return_dict", "batch_size")
)  # fmt: skip
_OWN_PATTERN = re.compile(
    r"callback|_kwargs$|embeds|_mask$|^latents$|_latents$|_per_prompt$|(^|_)(path|url|file|dir)s?$"
)
# Annotations with these words describe media, tensors or functions, also if they name a scalar type besides.
_OBJECTS = re.compile(r"Image|Tensor|Generator|Callable|ndarray|Audio|Video")


def find_settable_arguments(parameters: Mapping[str, inspect.Parameter]) -> dict[str, tuple[str, ...]]:
    """Return the JSON types of each argument that a client can set, such as `number` or `array of number`.

    Arguments are left out if they are objects such as tensors, or if the service sets them itself.
    """
    found = {}
    for name, parameter in parameters.items():
        types = () if name in _OWN or _OWN_PATTERN.search(name) else _find_json_types(parameter)
        if types:
            found[name] = types
    return found


def _find_json_types(parameter: inspect.Parameter) -> tuple[str, ...]:
    annotation = parameter.annotation
    if annotation is parameter.empty:
        # The inputs of modular pipelines have no annotation.
        text = type(parameter.default).__name__
    else:
        text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    if _OBJECTS.search(text):
        return ()
    items = [kind for inner in _LIST.findall(text) for kind in _find_scalars(inner)]
    return tuple(dict.fromkeys([*_find_scalars(_LIST.sub("", text)), *(f"array of {kind}" for kind in items)]))


def _find_scalars(text: str) -> list[str]:
    return [_JSON_TYPES[name] for name in re.findall(r"\w+", text) if name in _JSON_TYPES]
