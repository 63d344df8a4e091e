"""Recorder for a pipeline's model calls on the CPU, and a comparison with the calls on a device."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from anyaccel.forward_overrides import Slot, remove_override, set_override

__all__ = ["Comparison", "RecordedCall", "comparing", "find_tensors", "recording"]

# Methods besides `forward` that pipelines call on their models.
_METHODS = ("encode", "decode")


@dataclass(frozen=True)
class RecordedCall:
    """Input and output tensors of one model call, copied to the CPU."""

    name: str
    """Component, and method if it is not `forward`: `unet`, `vae.decode`."""
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Comparison:
    """Comparison of one model call on the device with the recorded call on the CPU."""

    name: str
    index: int
    """Position among the calls of this model, from 0; for a denoiser, the step."""
    isolated_error: float | None
    """Relative error with the CPU's inputs; None if the calls cannot be compared."""
    accumulated_error: float | None
    """Relative error with the device's own inputs, which includes the errors of earlier calls."""
    finite: bool


@contextmanager
def recording(pipe: Any) -> Iterator[list[RecordedCall]]:
    """Record every model call of a pipeline, in order, inside the `with` block."""
    calls: list[RecordedCall] = []

    def record(name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Copy the inputs first, because the call may change them in place.
        inputs = tuple(_copy_to_cpu(tensor) for tensor in find_tensors((args, kwargs)))
        output = call(*args, **kwargs)
        calls.append(RecordedCall(name, inputs, tuple(_copy_to_cpu(tensor) for tensor in find_tensors(output))))
        return output

    with _intercepting(pipe, record):
        yield calls


@contextmanager
def comparing(pipe: Any, expected: list[RecordedCall]) -> Iterator[list[Comparison]]:
    """Compare each model call inside the `with` block with the corresponding recorded call.

    Each call runs twice: with the recorded inputs, and with the pipeline's own inputs, which include
    the errors of earlier calls.
    """
    comparisons: list[Comparison] = []
    counts: dict[str, int] = {}

    def compare(name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        index = counts.get(name, 0)
        counts[name] = index + 1
        reference = next(itertools.islice(_calls_of(expected, name), index, None), None)
        isolated_error = None
        if reference is not None:
            replaced = _replace_tensors((args, kwargs), reference.inputs)
            if replaced is not None:
                cpu_args, cpu_kwargs = replaced
                isolated_error = _relative_error(reference.outputs, find_tensors(call(*cpu_args, **cpu_kwargs)))
        # The pipeline continues with the output for its own inputs, so the comparison does not change its image.
        output = call(*args, **kwargs)
        tensors = list(find_tensors(output))
        accumulated_error = _relative_error(reference.outputs, tensors) if reference is not None else None
        finite = all(bool(tensor.isfinite().all()) for tensor in tensors if tensor.is_floating_point())
        comparisons.append(Comparison(name, index, isolated_error, accumulated_error, finite))
        return output

    with _intercepting(pipe, compare):
        yield comparisons


def find_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples, mappings and model outputs, in a fixed order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from find_tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from find_tensors(item)
    elif hasattr(value, "parameters") and isinstance(getattr(value, "mean", None), torch.Tensor):
        yield value.mean  # the latent distribution of `AutoencoderKL.encode`


Interceptor = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@contextmanager
def _intercepting(pipe: Any, interceptor: Interceptor) -> Iterator[None]:
    """Pass every model call of a pipeline to `interceptor`, except calls inside another model call."""
    active: list[str] = []

    def intercept(name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A call inside another one belongs to it: `vae.decode` may call `vae.forward`.
        if active:
            return call(*args, **kwargs)
        active.append(name)
        try:
            return interceptor(name, call, args, kwargs)
        finally:
            active.clear()

    with ExitStack() as stack:
        for name, component in pipe.components.items():
            if not isinstance(component, torch.nn.Module):
                continue
            set_override(component, Slot.RECORDING, functools.partial(intercept, name))
            stack.callback(remove_override, component, Slot.RECORDING)
            for method in _METHODS:
                if callable(getattr(component, method, None)):
                    replacement = functools.partial(intercept, f"{name}.{method}")
                    stack.enter_context(_replacing_method(component, method, replacement))
        yield


@contextmanager
def _replacing_method(component: torch.nn.Module, method: str, intercept: Callable[..., Any]) -> Iterator[None]:
    # An instance attribute shadows the method of this component; other pipelines share the class.
    previous, call = vars(component).get(method), getattr(component, method)
    vars(component)[method] = lambda *args, **kwargs: intercept(call, args, kwargs)
    try:
        yield
    finally:
        if previous is None:
            del vars(component)[method]
        else:
            vars(component)[method] = previous


def _calls_of(calls: list[RecordedCall], name: str) -> Iterator[RecordedCall]:
    return (call for call in calls if call.name == name)


def _copy_to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _replace_tensors(value: Any, recorded: tuple[torch.Tensor, ...]) -> Any | None:
    """Return the call arguments with their tensors replaced by the recorded tensors.

    The recorded tensors are converted to the original dtypes and moved to the original devices. Return
    None if the shapes differ.
    """
    own = list(find_tensors(value))
    if [tensor.shape for tensor in own] != [tensor.shape for tensor in recorded]:
        return None
    remaining = iter(recorded)

    def replace(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            # Cast on the CPU: some devices do not have the dtype that was recorded.
            return next(remaining).to(item.dtype).to(item.device)
        if type(item) in (list, tuple):
            return type(item)(replace(element) for element in item)
        return {name: replace(element) for name, element in item.items()} if type(item) is dict else item

    replaced = replace(value)
    # `find_tensors` also yields tensors in other containers, such as model outputs, which `replace` does not rebuild.
    return replaced if next(remaining, None) is None else None


def _relative_error(expected: tuple[torch.Tensor, ...], actual: Any) -> float | None:
    """Return the largest relative L2 error of any tensor, or None if the shapes differ."""
    pairs = list(zip(expected, actual, strict=False))
    if len(pairs) != len(expected) or any(reference.shape != tensor.shape for reference, tensor in pairs):
        return None
    errors = []
    for reference, tensor in pairs:
        if reference.is_floating_point() and reference.numel():
            exact, other = reference.double(), tensor.detach().cpu().double()
            errors.append(float((exact - other).norm() / exact.norm().clamp(min=1e-12)))
    return max(errors, default=0.0)
