"""Methods of users' pipeline classes that anyaccel's class would otherwise hide, and the arguments of `to`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MemberDescriptorType
from typing import Any

import torch

from anyaccel.errors import UsageError

__all__ = [
    "call_own_to", "check_model_attributes", "find_own_methods", "read_attributes", "read_to_arguments",
    "write_attributes",
]  # fmt: skip

_LIBRARIES = ("anyaccel", "diffusers", "builtins")
# `to` always places the pipeline, and calls the user's method to move the models.
_PLACING = ("to", "place_with_plan")
_COPYING = ("__deepcopy__", "__reduce__")


def find_own_methods(kind: type, portable: type) -> dict[str, Any]:
    """Return the methods and attributes of a user's pipeline class that the portable class also has.

    A method of the user takes precedence, so that a custom pipeline works as it does in diffusers.
    """
    hidden = {
        name
        for base in portable.__mro__
        if base.__module__.partition(".")[0] == "anyaccel"
        for name in vars(base)
        if name not in _PLACING and (not name.startswith("__") or name in _COPYING)
    }
    own: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.partition(".")[0] not in _LIBRARIES:
            own |= {name: value for name, value in vars(base).items() if name in hidden}
    return own


def call_own_to(to: Callable[..., Any], device: torch.device, dtype: torch.dtype | None, **options: Any) -> bool:
    """Call a pipeline's `to` with the options that it accepts; return whether it accepted the dtype."""
    parameters = inspect.signature(to).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        to(device, dtype, **options)
        return True
    names = [parameter.name for parameter in parameters]
    # diffusers reads the dtype from `*args`; a user's method may have it as a parameter.
    takes_dtype = "dtype" in names or any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
    accepted = {name: value for name, value in options.items() if name in names}
    to(device, *([dtype] if takes_dtype and dtype is not None else []), **accepted)
    return takes_dtype or dtype is None


def check_model_attributes(models: Mapping[str, torch.nn.Module], to: Callable[..., Any]) -> None:
    """Raise `UsageError` if a model lacks an attribute that diffusers' `to` and `_execution_device` read."""
    if to.__module__.partition(".")[0] not in _LIBRARIES:
        return  # the user's own method may not need it
    for name, model in models.items():
        missing = [attribute for attribute in ("device", "dtype") if not hasattr(model, attribute)]
        if missing:
            raise UsageError(
                f"{name} is a {type(model).__name__}, which has no attribute {' and no attribute '.join(missing)}; the "
                "pipeline classes of diffusers require both of their components",
                hint=f"derive {type(model).__name__} from diffusers.ModelMixin, or add properties of these names",
            )


def read_attributes(pipe: Any) -> dict[str, Any]:
    """Return the attributes of a pipeline, including those in the `__slots__` of a user's class."""
    return {**vars(pipe), **{name: getattr(pipe, name) for name in _list_slots(pipe) if hasattr(pipe, name)}}


def write_attributes(pipe: Any, attributes: Mapping[str, Any]) -> None:
    """Set the attributes that `read_attributes` returned, without `__setattr__` of the pipeline."""
    slots = _list_slots(pipe)
    for name, value in attributes.items():
        if name in slots:
            object.__setattr__(pipe, name, value)
        else:
            vars(pipe)[name] = value


def _list_slots(pipe: Any) -> list[str]:
    return [
        name
        for base in type(pipe).__mro__
        for name, value in vars(base).items()
        if isinstance(value, MemberDescriptorType)
    ]


def read_to_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Parse the arguments of `to` into a device and options."""
    options = {name: value for name, value in kwargs.items() if name not in ("device", "silence_dtype_warnings")}
    device = kwargs.get("device")
    for value in args:
        if isinstance(value, torch.dtype):
            options["dtype"] = value
        elif value is not None:
            device = value
    if options.get("dtype", ...) is None:  # in diffusers, dtype=None leaves the dtype unchanged
        del options["dtype"]
    return device, options
