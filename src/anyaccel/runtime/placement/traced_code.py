"""Detection of user code that a memory trace would run.

A trace runs a pipeline once more. With code of the user in it, counters, logs and random numbers would differ from
diffusers. A call is therefore traced only if all of its code belongs to known libraries.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.nn import functional

from anyaccel.forward_overrides import OVERRIDES_KEY
from anyaccel.runtime.introspection import plain_class
from anyaccel.runtime.library_code import is_library, is_library_code
from anyaccel.upstream.diffusers_internals import read_attention_backends
from anyaccel.upstream.torch_internals import (
    MODULE_HOOKS,
    DeviceContext,
    read_dispatch_modes,
    read_function_modes,
    read_global_hooks,
)
from anyaccel.upstream.transformers_internals import read_attention_functions

__all__ = ["find_user_code"]

_OWN_LIBRARY = __name__.partition(".")[0]
# Libraries with objects whose attributes are searched too.
_SEARCHED_LIBRARIES = ("diffusers", "transformers")
_FUNCTIONS = (
    FunctionType, MethodType, classmethod, staticmethod, functools.partial, functools.partialmethod,
    functools.cached_property, type(functools.cache(len)),
)  # fmt: skip
# Attributes that the copy of a layer on `meta` does not have.
_NOT_COPIED = frozenset((*MODULE_HOOKS, OVERRIDES_KEY, "forward"))


def find_user_code(pipe: Any, arguments: Mapping[str, Any]) -> str:
    """Return a description of user code that a call on `meta` would run; empty if there is none."""
    return next(_list_user_code(pipe, arguments), "")


def _list_user_code(pipe: Any, arguments: Mapping[str, Any]) -> Iterator[str]:
    # Modes of torch too: FlopCounterMode would count the operations of the trace.
    modes = (mode for mode in (*read_function_modes(), *read_dispatch_modes()) if type(mode) is not DeviceContext)
    yield from (type(mode).__name__ for mode in modes if type(mode).__module__.partition(".")[0] != _OWN_LIBRARY)
    yield from ("a global hook" for table in read_global_hooks() if not all(map(_is_library_value, table.values())))
    yield from (f"the argument {name}" for name, value in arguments.items() if not _is_library_value(value))
    classes: set[type] = {torch.Tensor}
    for owner in _list_objects(pipe):
        kind = plain_class(owner)
        classes.update(kind.__mro__)
        yield from (f"{kind.__name__}.{name}" for name in _list_user_values(vars(owner), copied=False))
    for cls in classes:
        if not is_library(cls.__module__):
            yield cls.__name__
        yield from (f"a patched {cls.__name__}.{name}" for name in _list_user_values(vars(cls)))
    functions = (*read_attention_backends().values(), *read_attention_functions().values())
    yield from ("an attention function" for function in functions if not _is_library_object(function))
    names = {name for name in list(sys.modules) if name.startswith("diffusers.")} | {cls.__module__ for cls in classes}
    for module in (torch, functional, *(sys.modules.get(name) for name in sorted(names))):
        if isinstance(module, ModuleType):
            yield from (f"a patched {module.__name__}.{name}" for name in _list_user_values(vars(module)))


def _list_objects(pipe: Any) -> Iterator[Any]:
    """Yield a pipeline, its nested pipelines and components, their layers and processors, and objects in them."""
    seen: set[int] = set()
    pending = [pipe, *pipe.components.values()]
    while pending:
        owner = pending.pop()
        if id(owner) in seen or not hasattr(owner, "__dict__"):
            continue
        seen.add(id(owner))
        yield owner
        if isinstance(owner, torch.nn.Module):
            pending.extend(owner.children())
        for name, value in list(vars(owner).items()):
            if name not in _NOT_COPIED:
                # The blocks of modular pipelines are in a dict.
                pending.extend(entry for entry in (value, *_list_items(value)) if _is_searched(entry))


def _is_searched(value: Any) -> bool:
    kind = type(value)
    return kind is not FunctionType and kind.__module__.partition(".")[0] in _SEARCHED_LIBRARIES


def _list_user_values(namespace: Mapping[str, Any], *, copied: bool = True) -> list[str]:
    """Return the names in a namespace whose values are functions, classes or objects of the user."""
    if copied:
        return [name for name, value in list(namespace.items()) if not _is_library_object(value)]
    attributes = {name: value for name, value in namespace.items() if name not in _NOT_COPIED}
    return [
        name for name, value in attributes.items() if not all(map(_is_library_object, (value, *_list_items(value))))
    ]


def _is_library_value(value: Any) -> bool:
    """Return whether an argument, and everything in it, comes from a library."""
    if not _is_library_object(value):
        return False
    return all(map(_is_library_value, _list_items(value)))


def _list_items(value: Any) -> list[Any]:
    """Return the values in a dict, list, tuple or set; return an empty list for another object."""
    kind = type(value)
    if issubclass(kind, dict):
        return list(dict.values(value))  # not `value.values()`: a class of the user may override it
    for base in (list, tuple, set):
        if issubclass(kind, base):
            return list(base.__iter__(value))
    return []


def _is_library_object(value: Any) -> bool:
    """Return whether a function or class, or the class of another object, comes from a library."""
    kind = type(value)  # not isinstance, which runs the code of classes with a `__class__` property
    if issubclass(kind, type):
        return is_library(value.__module__)
    if kind is property:
        return all(_is_library_object(function) for function in (value.fget, value.fset) if function is not None)
    return is_library(kind.__module__) and (not issubclass(kind, _FUNCTIONS) or is_library_code(value))
