"""Copies of a pipeline for concurrent calls: they share the models, and no other object that a call may change."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import diffusers
import torch

from anyaccel.runtime.introspection import plain_class
from anyaccel.runtime.placement_state import Placement
from anyaccel.upstream.diffusers_internals import changes_models

__all__ = ["light_copy", "must_run_alone"]

_LOG = logging.getLogger("anyaccel")

# Key in the `__dict__` of a copy that must not run at the same time as other copies.
_RUNS_ALONE = "_anyaccel_runs_alone"
# Values without attributes that a call may change.
_CONSTANTS = (str, bytes, int, float, complex, type(None), type, FunctionType, ModuleType, torch.Tensor, torch.dtype)


def light_copy(pipe: Any) -> Any:
    """Return a copy of a pipeline that has the same models and its own schedulers, tokenizers and other attributes.

    Pipelines inside the pipeline are copied in the same way. The copy has its own placement state, so that it can
    run at the same time as other copies. A value that cannot be copied is shared; `must_run_alone` is then true.
    """
    # Schedulers and tokenizers are not thread-safe: https://github.com/huggingface/diffusers/issues/3672 and
    # https://github.com/huggingface/diffusers/issues/9362
    # The memo maps the id of each object to its copy, as in `copy.deepcopy`: an object that a pipeline and a pipeline
    # inside it both use is copied once.
    memo: dict[int, Any] = {}
    originals = list(_find_owners(pipe))  # kept until the end: the memo has only their ids
    pipelines = [owner for owner in originals if isinstance(owner, diffusers.DiffusionPipeline)]
    for owner in originals:
        memo[id(owner)] = _copy_owner(owner)
    pipe_copy = memo[id(pipe)]
    for pipeline in pipelines:
        for name, value in vars(pipeline).items():
            try:
                vars(memo[id(pipeline)])[name] = copy.deepcopy(value, memo)
            except Exception as error:  # noqa: BLE001 - the method that copies a value can be any code
                _LOG.debug("anyaccel: %s cannot be copied for concurrent calls: %r", name, error)
                vars(memo[id(pipeline)])[name] = value
                vars(pipe_copy)[_RUNS_ALONE] = True
    if any(map(_may_change_shared_state, pipelines)):
        vars(pipe_copy)[_RUNS_ALONE] = True
    return pipe_copy


def must_run_alone(pipe_copy: Any) -> bool:
    """Return whether calls of a copy may affect concurrent calls of other copies.

    These are calls that change the models or a value that cannot be copied, and calls of user code that may do so.
    """
    return _RUNS_ALONE in vars(pipe_copy)


def _may_change_shared_state(pipe: Any) -> bool:
    # A method that was replaced on the pipeline itself may belong to an object that all copies share.
    is_patched = any(callable(getattr(type(pipe), name, None)) for name in vars(pipe))
    return is_patched or changes_models(plain_class(pipe))


def _find_owners(pipe: Any) -> Iterator[Any]:
    """Yield the pipelines, models and placements that can be reached from a pipeline, beginning with itself.

    The layers of models are not searched.
    """
    pending, seen = [pipe], {id(pipe)}
    while pending:
        value = pending.pop()
        if isinstance(value, diffusers.DiffusionPipeline | torch.nn.Module | Placement):
            yield value
        if isinstance(value, torch.nn.Module | Placement):
            continue
        for child in _list_children(value):
            if not isinstance(child, _CONSTANTS) and id(child) not in seen:
                seen.add(id(child))
                pending.append(child)


def _list_children(value: Any) -> Iterable[Any]:
    """Return the values that `copy.deepcopy` would copy together with a value."""
    if isinstance(value, MethodType):
        return [value.__self__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    children: list[Any] = list(getattr(value, "__dict__", {}).values())
    if isinstance(value, dict):
        children += value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        children += value
    return children


def _copy_owner(owner: Any) -> Any:
    if isinstance(owner, Placement):
        return replace(owner, lock=threading.RLock(), running=False, shared=True)
    if isinstance(owner, diffusers.DiffusionPipeline):
        return object.__new__(type(owner))
    # The VAEs of Wan and Qwen-Image keep features of earlier frames in attributes. A shallow copy has its own
    # attributes and the same layers.
    return copy.copy(owner) if hasattr(owner, "clear_cache") else owner
