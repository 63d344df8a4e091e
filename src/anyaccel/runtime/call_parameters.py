"""The call arguments and outputs of a pipeline; for a modular pipeline, the inputs and outputs of its blocks."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from anyaccel.runtime.introspection import plain_class
from anyaccel.upstream.modular_blocks import find_blocks

__all__ = [
    "find_missing_arguments",
    "list_block_outputs",
    "read_blocks",
    "read_call_parameters",
    "read_class_parameters",
]

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def read_blocks(pipe: Any) -> Any:
    """Return the blocks of a modular pipeline, or None for another pipeline."""
    return find_blocks(pipe)


def read_call_parameters(pipe: Any) -> dict[str, inspect.Parameter]:
    """Return the named parameters of a pipeline's call; those of a modular pipeline are the inputs of its blocks.

    Without `**kwargs`: pipelines that have them silently ignore unknown names.
    """
    blocks = read_blocks(pipe)
    if blocks is None:
        return read_class_parameters(plain_class(pipe))
    # Which inputs are required depends on the other arguments; see `find_missing_arguments`. Inputs without a name
    # stand for several values, which earlier blocks create.
    return {
        item.name: inspect.Parameter(
            item.name, inspect.Parameter.KEYWORD_ONLY, default=item.default, annotation=_read_annotation(item)
        )
        for item in blocks.inputs
        if item.name
    }


def _read_annotation(item: Any) -> Any:
    return inspect.Parameter.empty if item.type_hint is None else item.type_hint


def read_class_parameters(kind: Any) -> dict[str, inspect.Parameter]:
    """Return the named parameters of the call of a pipeline class."""
    parameters = inspect.signature(kind.__call__).parameters
    return {name: value for name, value in parameters.items() if value.kind in _NAMED and name != "self"}


def find_missing_arguments(pipe: Any, call: Mapping[str, Any]) -> list[str]:
    """Return the names of the required arguments that are not in the call."""
    blocks = read_blocks(pipe)
    if blocks is None:
        parameters = read_call_parameters(pipe)
        return [name for name, item in parameters.items() if item.default is item.empty and name not in call]
    passed = {name: value for name, value in call.items() if value is not None}
    missing: list[str] = []
    while name := _find_missing_input(blocks, passed):
        missing.append(name)
        # With an image, for example, a block runs that computes its latents, which were missing before.
        passed[name] = True
    return missing


def _find_missing_input(blocks: Any, passed: Mapping[str, Any]) -> str | None:
    """Return the first required input that is not passed, of the blocks that would run with these inputs."""
    # The blocks of all tasks together also require values that the blocks of this task compute.
    selected = blocks.get_execution_blocks(**passed) if getattr(blocks, "sub_blocks", None) else blocks
    required = (item for item in getattr(selected, "inputs", ()) if item.required and item.default is None)
    return next((item.name for item in required if item.name and item.name not in passed), None)


def list_block_outputs(pipe: Any) -> list[str]:
    """Return the names of the outputs of a modular pipeline's blocks, in the order in which they are computed."""
    return [output.name for output in read_blocks(pipe).outputs]
