"""A model that has shapes and no numbers, in the place of a real one: a pipeline runs it as if it lay on the host."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch

from anyaccel.tracing.tracker import AttentionForm, tracking

__all__ = ["Held", "make_shell"]

_METHODS = ("forward", "encode", "decode")

Held = Callable[[str, str, int], None]
"""Is told of each call: the component, the method, and the bytes at its peak beside the weights."""


def make_shell(model: torch.nn.Module, name: str, form: AttentionForm, held: Held) -> torch.nn.Module:
    """Let a model on `meta` take and give tensors of the host; what it holds on the way is told."""
    kind = type(model)
    model.__class__ = type(kind.__name__, (kind,), {"device": property(lambda self: torch.device("cpu"))})
    inside: list[str] = []
    for method in _METHODS:
        if callable(getattr(model, method, None)):
            vars(model)[method] = _wrap(model, name, method, form, held, inside)
    return model


def _wrap(
    model: torch.nn.Module, name: str, method: str, form: AttentionForm, held: Held, inside: list[str]
) -> Callable[..., Any]:
    call = getattr(model, method)

    def run(*args: Any, **kwargs: Any) -> Any:
        if inside:  # a method that calls another one is one call
            return call(*args, **kwargs)
        inside.append(method)
        try:
            with tracking(model, form) as tracker:
                given, named = _map(args, _to_meta), _map(kwargs, _to_meta)
                made = call(*given, **named)
            held(name, method, tracker.peak)
            return _map(made, _to_host)
        finally:
            inside.clear()

    return run


def _to_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


def _map(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same with every tensor changed, in lists, tuples, mappings, outputs and what an autoencoder gives."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        changed = {name: _map(part, change) for name, part in value.items()}
        return changed if type(value) is dict else type(value)(**changed)
    if isinstance(value, list | tuple):
        return type(value)(_map(part, change) for part in value)
    if isinstance(getattr(value, "mean", None), torch.Tensor):  # a distribution
        copied = copy.copy(value)
        for name, part in vars(value).items():
            if isinstance(part, torch.Tensor):
                setattr(copied, name, change(part))
        return copied
    return value
