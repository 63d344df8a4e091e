"""Models on the `meta` device that pipelines can call as if the models were on the CPU."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from anyaccel.forward_overrides import Slot, set_override

__all__ = ["MAX_KEPT_OUTPUT_BYTES", "MetaRunner", "first_floating", "map_tensors", "to_meta_module"]

# Largest model output that the check for NaN and Inf keeps until the end of a call.
MAX_KEPT_OUTPUT_BYTES = 2**20

_METHODS = ("encode", "decode")
# Modules of a model that pipelines also call directly: the quantizer of a VQ autoencoder.
_CALLED_MODULES = ("quantize",)
# Modules that an autoencoder calls once per tile.
_TILED_MODULES = ("encoder", "decoder")
# Methods with which an autoencoder blends two tiles, row by row.
_BLENDS = ("blend_v", "blend_h", "blend_t")


class MetaRunner(Protocol):
    """Interface for running a pipeline's calls to models on the `meta` device."""

    def run_model(self, name: str, method: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run one model call on `meta` and return its result as CPU tensors."""

    def run_submodule(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run one call to a submodule, such as a repeated block, and return its result on `meta`."""


def to_meta_module(model: torch.nn.Module, name: str, runner: MetaRunner) -> torch.nn.Module:
    """Modify a model on `meta` so that it accepts and returns CPU tensors, and return the model.

    `runner` runs all calls to the model.
    """
    model_class = type(model)
    # transformers finds the outputs that a model can record by the full name of its class.
    namespace = {
        "__module__": model_class.__module__,
        "__qualname__": model_class.__qualname__,
        "device": property(lambda self: torch.device("cpu")),
    }
    model.__class__ = type(model_class.__name__, (model_class,), namespace)
    active_calls: list[str] = []
    set_override(model, Slot.RECORDING, functools.partial(_run_model, name, "forward", runner, active_calls))
    for method in _METHODS:
        call = getattr(model, method, None)
        if callable(call):
            vars(model)[method] = _wrap(call, name, method, runner, active_calls)
    for child, submodule in _find_children(model, _CALLED_MODULES).items():
        set_override(submodule, Slot.RECORDING, functools.partial(_run_model, name, child, runner, active_calls))
    for method in _BLENDS:
        if callable(getattr(model, method, None)):
            vars(model)[method] = _blend_once(getattr(model, method), f"{name}.{method}", runner)
    for child, submodule in _find_children(model, _TILED_MODULES).items():
        set_override(submodule, Slot.RECORDING, functools.partial(runner.run_submodule, f"{name}.{child}"))
    # Only one block of each kind is traced; the others reuse its result.
    for key, blocks in _find_repeated(model).items():
        for block in blocks:
            set_override(block, Slot.RECORDING, functools.partial(runner.run_submodule, f"{name}.{key}"))
    return model


def _find_children(model: torch.nn.Module, names: tuple[str, ...]) -> dict[str, torch.nn.Module]:
    """Return the children of a model that have one of the given names."""
    children = {name: getattr(model, name, None) for name in names}
    return {name: child for name, child in children.items() if isinstance(child, torch.nn.Module)}


def _find_repeated(model: torch.nn.Module) -> dict[str, list[torch.nn.Module]]:
    """Group a model's blocks that are in the same `ModuleList` and have the same class and weight shapes."""
    groups: dict[str, list[torch.nn.Module]] = {}
    for position, module in enumerate(model.modules()):
        if isinstance(module, torch.nn.ModuleList) and len(module) > 2:
            for block in (block for block in module if block is not None):  # Würstchen's lists contain None
                shapes = hash(tuple((path, tuple(weight.shape)) for path, weight in block.named_parameters()))
                groups.setdefault(f"{position} {type(block).__name__} {shapes}", []).append(block)
    return {name: blocks for name, blocks in groups.items() if len(blocks) > 2}


def _blend_once(call: Callable[..., Any], name: str, runner: MetaRunner) -> Callable[..., Any]:
    """Wrap a VAE's method that blends two tiles so that it blends one row, once per layout of the tiles.

    Every row needs the same memory, and a large image has tens of thousands of rows. The method changes `b` and
    returns it.
    """

    def blend_row(a: torch.Tensor, b: torch.Tensor, blend_extent: int) -> None:
        call(a, b, min(blend_extent, 1))

    @functools.wraps(call)
    def blend(a: torch.Tensor, b: torch.Tensor, blend_extent: int) -> torch.Tensor:
        runner.run_submodule(name, blend_row, (a, b, blend_extent), {})
        return b

    return blend


def _wrap(
    call: Callable[..., Any], name: str, method: str, runner: MetaRunner, active_calls: list[str]
) -> Callable[..., Any]:
    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        return _run_model(name, method, runner, active_calls, call, args, kwargs)

    return run


def _run_model(
    name: str,
    method: str,
    runner: MetaRunner,
    active_calls: list[str],
    call: Callable[..., Any],
    args: Any,
    kwargs: Any,
) -> Any:
    if active_calls:  # a method that calls another method (forward calls decode) counts as one call
        return call(*args, **kwargs)
    active_calls.append(method)
    try:
        return runner.run_model(name, method, call, args, kwargs)
    finally:
        active_calls.clear()


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a nested value with `change` applied to every tensor in it.

    Supports lists, tuples, mappings, model outputs and latent distributions.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping) and type(value) is dict:
        return {name: map_tensors(item, change) for name, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, change) for item in value)
    if isinstance(value, Mapping) or _is_distribution(value):
        return _map_object(value, change)
    return value


def _map_object(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a copy of a model output or a latent distribution with `change` applied to its tensors."""
    copied = copy.copy(value)
    for name, item in list(vars(value).items()):
        if isinstance(item, torch.Tensor | list | tuple | Mapping) or _is_distribution(item):
            object.__setattr__(copied, name, map_tensors(item, change))
    # A ModelOutput has each value twice, as an entry and as an attribute: both must be the same object.
    if isinstance(copied, dict):
        for name, item in list(value.items()):
            dict.__setitem__(copied, name, vars(copied).get(name, map_tensors(item, change)))
    return copied


def _is_distribution(value: Any) -> bool:
    return isinstance(getattr(value, "parameters", None), torch.Tensor)


def first_floating(output: Any) -> torch.Tensor | None:
    """Return the first floating-point tensor in a model output, or None if there is none."""
    if isinstance(output, torch.Tensor):
        return output if output.is_floating_point() else None
    # Not every object with a `values` attribute: it may be a tensor of the user.
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, list | tuple) else ()
    for value in values:
        tensor = first_floating(value) if isinstance(value, torch.Tensor | list | tuple) else None
        if tensor is not None:
            return tensor
    return None
