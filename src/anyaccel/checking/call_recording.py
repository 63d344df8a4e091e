"""Recording what every model of a pipeline is given and gives, so that another device can be held against it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from anyaccel.forward_overrides import Slot, remove_override, set_override

__all__ = ["Comparison", "RecordedCall", "comparing", "find_tensors", "recording"]

_METHODS = ("encode", "decode")
"""What pipelines call on their models besides `forward`."""


@dataclass(frozen=True)
class RecordedCall:
    """One call of one model: the tensors that went in and came out, on the host."""

    name: str
    """`unet`, `vae.decode`."""
    given: tuple[torch.Tensor, ...]
    made: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Comparison:
    """One call on the device beside the one on the host."""

    name: str
    index: int
    """Which call of this model it is; for a denoiser, the step."""
    alone: float | None
    """The relative error with the host's inputs; None where the calls cannot be compared."""
    along: float | None
    """The relative error with the device's own inputs: what has added up so far."""
    finite: bool


@contextmanager
def recording(pipe: Any) -> Iterator[list[RecordedCall]]:
    """Keep every call of every model of a pipeline, in order."""
    calls: list[RecordedCall] = []

    def keep(name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = tuple(_to_host(one) for one in find_tensors((args, kwargs)))
        made = call(*args, **kwargs)
        calls.append(RecordedCall(name, given, tuple(_to_host(one) for one in find_tensors(made))))
        return made

    with _listening(pipe, keep):
        yield calls


@contextmanager
def comparing(pipe: Any, expected: list[RecordedCall]) -> Iterator[list[Comparison]]:
    """Hold every call of every model against a recorded one, twice: with the recorded inputs, and with its own."""
    found: list[Comparison] = []
    counts: dict[str, int] = {}

    def compare(name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        index = counts.get(name, 0)
        counts[name] = index + 1
        other = next((one for at, one in enumerate(_of(expected, name)) if at == index), None)
        alone = None
        if other is not None:
            replaced = _replace((args, kwargs), other.given)
            if replaced is not None:
                again_args, again_kwargs = replaced
                alone = _error(other.made, find_tensors(call(*again_args, **again_kwargs)))
        made = call(*args, **kwargs)
        tensors = list(find_tensors(made))
        along = _error(other.made, tensors) if other is not None else None
        finite = all(bool(one.isfinite().all()) for one in tensors if one.is_floating_point())
        found.append(Comparison(name, index, alone, along, finite))
        return made

    with _listening(pipe, compare):
        yield found


def find_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor inside lists, tuples, mappings and outputs of diffusers and transformers, in a fixed order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from find_tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from find_tensors(part)
    elif hasattr(value, "parameters") and isinstance(getattr(value, "mean", None), torch.Tensor):
        yield value.mean  # the distribution that an autoencoder gives


Listener = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@contextmanager
def _listening(pipe: Any, listener: Listener) -> Iterator[None]:
    """Let a listener make every call of every model of a pipeline; calls within calls are the model's own matter."""
    inside: list[str] = []

    def listen(name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if inside:
            return call(*args, **kwargs)
        inside.append(name)
        try:
            return listener(name, call, args, kwargs)
        finally:
            inside.clear()

    with ExitStack() as stack:
        for name, component in pipe.components.items():
            if not isinstance(component, torch.nn.Module):
                continue
            set_override(component, Slot.RECORDING, functools.partial(listen, name))
            stack.callback(remove_override, component, Slot.RECORDING)
            for method in _METHODS:
                if callable(getattr(component, method, None)):
                    stack.enter_context(_replacing(component, method, functools.partial(listen, f"{name}.{method}")))
        yield


@contextmanager
def _replacing(component: torch.nn.Module, method: str, listen: Callable[..., Any]) -> Iterator[None]:
    before, call = vars(component).get(method), getattr(component, method)
    vars(component)[method] = lambda *args, **kwargs: listen(call, args, kwargs)
    try:
        yield
    finally:
        if before is None:
            del vars(component)[method]
        else:
            vars(component)[method] = before


def _of(calls: list[RecordedCall], name: str) -> Iterator[RecordedCall]:
    return (call for call in calls if call.name == name)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _replace(value: Any, recorded: tuple[torch.Tensor, ...]) -> Any | None:
    """The same arguments with the recorded numbers, where and in the type in which these are; None if they differ."""
    own = list(find_tensors(value))
    if [one.shape for one in own] != [one.shape for one in recorded]:
        return None
    left = iter(recorded)

    def change(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return next(left).to(part.dtype).to(part.device)
        if type(part) in (list, tuple):
            return type(part)(change(one) for one in part)
        return {name: change(one) for name, one in part.items()} if type(part) is dict else part

    changed = change(value)
    return changed if next(left, None) is None else None


def _error(expected: tuple[torch.Tensor, ...], seen: Any) -> float | None:
    """The largest relative error (of the norm) of any tensor; None where the shapes are others."""
    pairs = list(zip(expected, seen, strict=False))
    if len(pairs) != len(expected) or any(one.shape != other.shape for one, other in pairs):
        return None
    errors = []
    for one, other in pairs:
        if one.is_floating_point() and one.numel():
            here, there = one.double(), other.detach().cpu().double()
            errors.append(float((here - there).norm() / here.norm().clamp(min=1e-12)))
    return max(errors, default=0.0)
