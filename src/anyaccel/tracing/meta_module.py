"""A model that has shapes and no numbers in the place of a real one: a pipeline runs it as if it lay on the host."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from anyaccel.forward_overrides import Slot, set_override

__all__ = ["WATCHED_BYTES", "MetaRunner", "first_floating", "map_tensors", "to_meta_module"]

WATCHED_BYTES = 2**20
"""What a model gave last is kept until the end of a call, to be looked at, if it is no larger than this."""

_METHODS = ("encode", "decode")
_PARTS = ("encoder", "decoder")
"""What an autoencoder runs for one tile after another."""
_BLENDS = ("blend_v", "blend_h", "blend_t")
"""How an autoencoder joins two tiles, row by row."""


class MetaRunner(Protocol):
    """Runs a model whose weights are shapes alone on what a pipeline of the host gives it."""

    def run_model(self, name: str, method: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The result of one call, on the host."""

    def run_part(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The result of one call of a part that may be called often, with shapes alone."""


def to_meta_module(model: torch.nn.Module, name: str, runner: MetaRunner) -> torch.nn.Module:
    """Let a model on `meta` take and give tensors of the host."""
    kind = type(model)
    content = {  # transformers finds what a model can record by the class's full name
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "device": property(lambda self: torch.device("cpu")),
    }
    model.__class__ = type(kind.__name__, (kind,), content)
    inside: list[str] = []
    set_override(model, Slot.RECORDING, functools.partial(_run_model, name, "forward", runner, inside))
    for method in _METHODS:
        call = getattr(model, method, None)
        if callable(call):
            vars(model)[method] = _wrap(call, name, method, runner, inside)
    for method in _BLENDS:
        if callable(getattr(model, method, None)):
            vars(model)[method] = _blend_one_row(getattr(model, method))
    for child in _PARTS:
        part = getattr(model, child, None)
        if isinstance(part, torch.nn.Module):
            set_override(part, Slot.RECORDING, functools.partial(runner.run_part, f"{name}.{child}"))
    for kind_of_block, blocks in _find_repeated(model).items():
        for block in blocks:
            set_override(block, Slot.RECORDING, functools.partial(runner.run_part, f"{name}.{kind_of_block}"))
    return model


def _find_repeated(model: torch.nn.Module) -> dict[str, list[torch.nn.Module]]:
    """The blocks that a model has several times over: of one class, in one list, with weights of the same shapes."""
    found: dict[str, list[torch.nn.Module]] = {}
    for place, module in enumerate(model.modules()):
        if isinstance(module, torch.nn.ModuleList) and len(module) > 2:
            for block in module:
                shapes = hash(tuple((path, tuple(one.shape)) for path, one in block.named_parameters()))
                found.setdefault(f"{place} {type(block).__name__} {shapes}", []).append(block)
    return {name: blocks for name, blocks in found.items() if len(blocks) > 2}


def _blend_one_row(call: Callable[..., Any]) -> Callable[..., Any]:
    """Every row holds what the first one does, and a large picture has ten thousands."""

    @functools.wraps(call)
    def blend(a: torch.Tensor, b: torch.Tensor, blend_extent: int) -> Any:
        return call(a, b, min(blend_extent, 1))

    return blend


def _wrap(
    call: Callable[..., Any], name: str, method: str, runner: MetaRunner, inside: list[str]
) -> Callable[..., Any]:
    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        return _run_model(name, method, runner, inside, call, args, kwargs)

    return run


def _run_model(
    name: str, method: str, runner: MetaRunner, inside: list[str], call: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    if inside:  # a method that calls another one is one call
        return call(*args, **kwargs)
    inside.append(method)
    try:
        return runner.run_model(name, method, call, args, kwargs)
    finally:
        inside.clear()


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same with every tensor changed, in lists, tuples, mappings, outputs and what an autoencoder gives."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping) and type(value) is dict:
        return {name: map_tensors(part, change) for name, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(part, change) for part in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(part, change) for part in value)
    if isinstance(value, Mapping) or _is_distribution(value):
        return _map_object(value, change)
    return value


def _map_object(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """An output of a model, or the distribution that an autoencoder gives: the same kind, attribute by attribute."""
    copied = copy.copy(value)
    for name, part in list(vars(value).items()):
        if isinstance(part, torch.Tensor | list | tuple | Mapping) or _is_distribution(part):
            object.__setattr__(copied, name, map_tensors(part, change))
    if isinstance(copied, dict):  # an output's entries are its attributes too
        for name, part in list(value.items()):
            dict.__setitem__(copied, name, vars(copied).get(name, map_tensors(part, change)))
    return copied


def _is_distribution(value: Any) -> bool:
    return isinstance(getattr(value, "parameters", None), torch.Tensor)


def first_floating(output: Any) -> torch.Tensor | None:
    """The first tensor of real numbers in what a model gave."""
    if isinstance(output, torch.Tensor):
        return output if output.is_floating_point() else None
    values = output.values() if hasattr(output, "values") else output if isinstance(output, list | tuple) else ()
    for value in values:
        found = first_floating(value) if isinstance(value, torch.Tensor | list | tuple) else None
        if found is not None:
            return found
    return None
